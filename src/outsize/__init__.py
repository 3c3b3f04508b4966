"""Outsize: fine-tune image and language models larger than the card that trains them."""

__version__ = "0.1.0"
