"""The teaching base: a small image model trained by this project, and the pictures to adapt it with.

Only paths live here, so that importing this package loads no numeric library. The model is in the diffusers folder
layout of FLUX.2 klein; `base/MODEL_CARD.md` says what it is and what it is not. Scores are in `outsize.teaching.score`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BASE",
    "CATS",
    "GALLERY_NAMES",
    "GALLERY_PICTURES",
    "HELD_OUT",
    "OTHERS",
    "PROMPTS",
    "RECIPE",
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
