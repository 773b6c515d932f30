"""What is measured: a step of work in phases, over batches, on a device."""
