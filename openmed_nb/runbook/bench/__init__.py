"""Measure what a model costs: workloads, timing, sweep, compare, profile."""
