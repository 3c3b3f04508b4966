"""What a recipe learns from, as a plan counts it: one task for each objective."""
