"""Which device, and why. Nothing here imports torch at module level."""
