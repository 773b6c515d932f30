"""Record what was measured: logbook, system status, report, bring-up, handoff."""
