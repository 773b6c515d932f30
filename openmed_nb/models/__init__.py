"""What runs: a name, the files behind it, and the model on the chosen device."""
