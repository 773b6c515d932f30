"""One recommendation from all reports: ``metrics`` declares what is measured, ``rules`` decide, ``verdict`` has the answer."""
