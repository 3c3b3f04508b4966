"""Checkpoint files in, prepared base out: positioned reads, stores by block, host-memory budget."""
