"""The Python face of the runbook: is this device right? Each function calls one verb of the session."""

from __future__ import annotations
