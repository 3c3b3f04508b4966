"""Programs that are told what happens in a run, by name; `protocol.py` says what one is."""
