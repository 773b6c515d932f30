"""Gates, and one recommendation from all reports."""
