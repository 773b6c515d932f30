"""What the computer says of its load, memory, power and heat, without administrator rights: parsers, reading, the value."""
