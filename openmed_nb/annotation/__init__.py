"""Running a token-classification model over texts. Named unlike ``openmed_nb.annotate``, which is a function."""
