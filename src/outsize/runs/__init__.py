"""The run folder: recipe, plan, journal, checkpoints, state; nothing that is not on disk."""
