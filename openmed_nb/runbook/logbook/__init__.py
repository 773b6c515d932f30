"""The logbook: what figures were measured with, so that nobody compares what cannot be compared."""
