"""Operators of a model that fall back from MPS to the CPU: predicted on any machine, and recorded on a Mac."""
