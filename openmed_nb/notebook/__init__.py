"""The faces in a notebook: magics, completion, the panel."""
