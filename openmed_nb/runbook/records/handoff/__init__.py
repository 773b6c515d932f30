"""Handoff: a bundle that runs a model on another machine and checks that the results are the same."""
