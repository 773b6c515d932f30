"""Which operators of a model leave MPS for the CPU: foretold on any computer, and seen on a Mac."""
