"""The logbook: what figures were measured with, so that only what can be compared is."""
