"""File formats of annotations, one module per format. The registry lists them."""
