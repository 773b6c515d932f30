"""Whether a device and a type give the same answers.

``parity`` compares with the CPU in float32, ``validation`` stores what it finds of a reduced type, and ``trajectory`` compares
trainings. What is required stands in ``policy``; what is stored, in ``openmed_nb.models.records``.
"""
