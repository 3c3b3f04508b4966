"""Optimisers by name, one file each; see protocol.py."""
