"""The handoff: a folder that another computer can run, and that proves there that it does what it did here."""
