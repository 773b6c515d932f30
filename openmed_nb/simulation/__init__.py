"""A simulated MPS device for computers without one: it computes on the CPU, and says, counts and refuses what MPS does."""
