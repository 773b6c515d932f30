"""Is the device right: what is looked at, the facts, and the report."""
