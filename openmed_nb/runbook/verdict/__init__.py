"""One recommendation from all reports.

``metrics`` declares the metrics, ``rules`` contains the decision matrix, and ``verdict`` the result.
"""
