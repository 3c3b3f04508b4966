"""The models that a recipe needs, each with its family, format and source: the base and its conditioners.

Known by slot ("base", "text_encoder", "vae", ...). Nothing is opened here; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outsize.families.protocol import (
    FAMILIES,
    Component,
    ImageCodec,
    ModelFamily,
    TextEncoder,
    TrainedFamily,
)
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.plan.names import base_family, check_names
from outsize.recipes.recipe import rest_format

if TYPE_CHECKING:
    from outsize.recipes.recipe import ComponentChoice, FormatChoice, Recipe

BASE = "base"
Kind = Literal["base", "text", "image"]


@dataclass(frozen=True)
class Part:
    """One model of a recipe.

    folder: its place in a diffusers repository. tokenizer: that of its tokenizer, for text encoders. tokenizer_source: where
    that is looked for, if not beside the weights.
    """

    slot: str
    kind: Kind
    family_name: str
    variant: str
    family: TrainedFamily | TextEncoder | ImageCodec
    source: str
    revision: str | None
    folder: str
    tokenizer: str | None
    packing: Packing
    tokenizer_source: str | None = None

    @property
    def named_source(self) -> str:
        """The source with its revision, which stands behind the repository's name, as weights and tokenizers are asked for."""
        if self.revision is None:
            return self.source
        owner, name, *file = self.source.split("/", 2)
        return "/".join((owner, f"{name}@{self.revision}", *file))


def parts_of(recipe: Recipe) -> dict[str, Part]:
    """All models of a recipe by slot, the base first.

    Raises: RecipeError that lists every name that no plug-in has.
    """
    check_names(recipe)
    family, variant = base_family(recipe.base.family), recipe.base.variant
    base = Part(
        slot=BASE,
        kind="base",
        family_name=recipe.base.family,
        variant=variant,
        family=family,
        source=recipe.base.source,
        revision=recipe.base.revision,
        folder=family.folder,
        tokenizer=None,
        packing=_packing(family, variant, recipe.base.format, "base"),
    )
    conditioners = (_component_part(recipe, one) for one in family.components(variant))
    return {BASE: base} | {part.slot: part for part in conditioners}


def of_kind(parts: dict[str, Part], kind: Kind) -> Iterator[Part]:
    """The parts of one kind, in the order in which they are used."""
    return (part for part in parts.values() if part.kind == kind)


def _component_part(recipe: Recipe, component: Component) -> Part:
    family: TextEncoder | ImageCodec = FAMILIES.load(component.family)
    choice: ComponentChoice = recipe.base.component(component.slot)
    chosen = recipe.base.component_format(component.slot, component.kind)
    own_source = choice.source is not None
    return Part(
        slot=component.slot,
        kind=component.kind,
        family_name=component.family,
        variant=component.variant,
        family=family,
        source=choice.source or recipe.base.source,
        revision=choice.revision if own_source else recipe.base.revision,
        folder=component.slot,
        tokenizer=component.tokenizer,
        packing=_packing(family, component.variant, chosen, component.kind),
        tokenizer_source=choice.tokenizer,
    )


def _packing(family: ModelFamily, variant: str, chosen: FormatChoice, kind: Kind) -> Packing:
    packed, rest = (make_format(one.name, one.options) for one in (chosen, rest_format(kind)))
    return assign(family.table(variant), packed, rest)
