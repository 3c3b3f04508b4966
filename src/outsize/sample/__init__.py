"""Pictures from a base with and without its adapter, and their comparison."""
