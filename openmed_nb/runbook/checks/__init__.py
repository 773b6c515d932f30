"""Check that a device is right: doctor, parity, precision, fallbacks, operator forecast."""
