"""A narrow look at some steps: where the time goes, what waits for the device, and which operators take long."""
