"""Run token-classification models over texts. The public function is ``openmed_nb.annotate``."""
