"""Adapters in the forms other programs read."""
