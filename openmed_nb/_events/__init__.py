"""Tell listeners what the session is doing, and draw its progress."""
