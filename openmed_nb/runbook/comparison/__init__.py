"""The same work on each device in one run: how much faster, and where the time goes."""
