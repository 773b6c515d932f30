"""Whether a device and a type give the same answers: ``parity`` with the CPU in float32, and ``validation`` of reduced types."""
