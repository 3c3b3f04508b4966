"""What the demos learn from: a small image model trained by this project with pictures, and texts for a language model.

Only paths live here, so that importing this package loads no numeric library. The image model is in the diffusers folder
layout of FLUX.2 klein; `base/MODEL_CARD.md` says what it is and what it is not. Scores are in `outsize.teaching.score`.
The language model and the plays are other people's packages: `wheels.py` fetches them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BASE",
    "CATS",
    "GALLERY_NAMES",
    "GALLERY_PICTURES",
    "HELD_OUT",
    "MODERN",
    "OTHERS",
    "PROMPTS",
    "RECIPE",
    "TEXT_RECIPE",
]

_HERE = Path(__file__).parent

BASE = _HERE / "base"
"""Model folder: transformer, vae, text_encoder, tokenizer, scheduler."""
CATS = _HERE / "pictures" / "cats"
"""16 cats to train an adapter with, PNG beside .txt captions."""
HELD_OUT = _HERE / "pictures" / "held_out"
"""8 cats that nothing was trained on."""
OTHERS = _HERE / "pictures" / "others"
"""96 pictures of subjects the base knows, to keep them while cats are learnt (regularisation)."""
GALLERY_PICTURES = _HERE / "pictures" / "gallery.png"
"""Atlas of every real picture, for the nearest-picture score."""
GALLERY_NAMES = _HERE / "pictures" / "gallery.json"
"""Names, styles and backgrounds of the atlas."""
RECIPE = _HERE / "recipe.yaml"
"""The recipe of the demo; its paths are relative to its own folder."""
PROMPTS = _HERE / "prompts.json"
"""The fixed prompts of the score: cats and controls, with the rule that chose them."""
TEXT_RECIPE = _HERE / "text_recipe.yaml"
"""The recipe of the text demo; its paths are relative to the folder that the demo works in."""
MODERN = _HERE / "modern.txt"
"""Plain prose of today, written for this project and under its licence: what a model should still know after the plays."""
