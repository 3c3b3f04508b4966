"""Frozen linears over packed weights, and blocks that run under one acquisition of them."""
