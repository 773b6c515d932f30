"""Notebook front ends: magics, tab completion and the panel."""
