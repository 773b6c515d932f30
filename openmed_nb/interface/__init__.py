"""The faces: Python functions, magics and (later) a panel over one session; and the one room that renders."""
