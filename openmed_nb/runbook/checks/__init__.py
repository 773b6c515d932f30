"""Checks of a device: doctor, parity, reduced precision, CPU fallbacks and operator forecast."""
