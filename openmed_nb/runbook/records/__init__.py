"""Records of measurements: logbook, system status, report, bring-up and handoff."""
