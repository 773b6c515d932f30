"""The panel: the session's device, environment, memory and models to look at and to click."""
