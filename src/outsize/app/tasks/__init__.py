"""What a recipe learns from, as a run uses it: one task for each objective."""
