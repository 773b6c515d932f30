"""Comparison of results across devices and dtypes.

``parity`` compares a model with the CPU in float32, ``validation`` stores a validation record of a reduced dtype, and
``trajectory`` compares training runs. ``policy`` defines the acceptance criteria, and ``openmed_nb.models.records`` the stored
records.
"""
