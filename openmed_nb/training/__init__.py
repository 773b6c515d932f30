"""Train without memory creeping up: epoch boundaries, the memory curve, steps that fit, guards."""
