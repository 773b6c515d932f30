"""Is the same found on this device, in this type: parity with the CPU in float32, and the gate of reduced types."""
