"""General helpers: lazy imports, JSON data, text, argument checks and warnings."""
