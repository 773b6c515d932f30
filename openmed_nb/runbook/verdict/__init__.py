"""One recommendation from all reports: ``metrics`` declares the metrics, ``rules`` decide, ``verdict`` holds the result."""
