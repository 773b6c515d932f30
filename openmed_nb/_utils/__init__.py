"""Helpers without a domain: lazy imports, plain data, files written whole."""
