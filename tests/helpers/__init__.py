"""Models, computers, kernels, pages and panels for tests. Tests import them, because pytest adds `tests` to the path."""
