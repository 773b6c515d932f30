"""One recommendation from all reports: ``evidence`` has the figures, ``gates`` the thresholds and rules, ``verdict`` the answer."""
