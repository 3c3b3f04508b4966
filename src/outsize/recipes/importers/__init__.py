"""Plug-ins: one file each, named by it; see protocol.py."""
