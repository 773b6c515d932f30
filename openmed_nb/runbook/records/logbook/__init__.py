"""Logbook: the conditions of a measurement, which decide whether two measurements are comparable."""
