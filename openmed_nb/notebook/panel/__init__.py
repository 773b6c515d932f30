"""The panel: what it shows, as values; its widgets."""
