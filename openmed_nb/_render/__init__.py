"""Show values as text, HTML, JSON and charts; data objects know nothing of it."""
