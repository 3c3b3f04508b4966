"""PEFT adapters attached by role, and proof that they learn."""
