"""Rendering of values as text, HTML, JSON and charts."""
