"""Is it worth it: thresholds with their reasons, and the one recommendation that the reports together lead to."""
