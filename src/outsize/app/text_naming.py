"""What transformers and vLLM call a language base's modules: as the class does that config.json of the source names.

A checkpoint with towers beside the text is opened by a class that keeps the decoder one level deeper. An adapter under the
names of the text class alone would be passed over there without a word, so the names follow the source.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from outsize.app.parts import BASE, parts_of
from outsize.app.tasks.protocol import Naming
from outsize.base.errors import SourceError
from outsize.weights.locate import locate_folder

if TYPE_CHECKING:
    from outsize.app.parts import Part
    from outsize.families.protocol import LanguageFamily
    from outsize.recipes.recipe import Recipe

PEFT_TASK = "CAUSAL_LM"
_TEXT_ALONE = "ForCausalLM"  # how transformers ends the names of classes that hold nothing but text


def naming_of(recipe: Recipe) -> Naming:
    """Names for the recipe's source; those of the text class where nothing says which class opens it."""
    part = parts_of(recipe)[BASE]
    own = part.family.published(part.variant).upstream
    found = _class_of(part) or own
    layouts = part.family.layouts(part.variant)
    deeper = next((one for one in layouts if one.name == "conditional"), None)
    is_deeper = not found.endswith(_TEXT_ALONE) and deeper is not None
    return Naming(deeper if is_deeper else layouts[0], found, PEFT_TASK)


def _class_of(part: Part) -> str | None:
    """The class that the source's config.json names."""
    family = cast("LanguageFamily", part.family)
    source = part.source if part.revision is None else f"{part.source}@{part.revision}"
    try:
        folder = locate_folder(source, family.tokenizer_folder, offline=True)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (SourceError, OSError, ValueError):
        return None
    named = config.get("architectures") or [None]
    return named[0] if isinstance(named[0], str) else None
