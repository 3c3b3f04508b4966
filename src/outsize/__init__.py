"""Outsize: fine-tune image models larger than the card that trains them."""

__version__ = "0.1.0"
