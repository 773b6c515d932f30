"""Measure and judge: is this device right, with figures, as values that can be shown, compared and handed on."""
