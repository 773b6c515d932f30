"""Simulated MPS device for other computers: it computes on the CPU, and reproduces the errors of MPS."""
