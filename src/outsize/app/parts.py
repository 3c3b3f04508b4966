"""The models that a recipe needs, each with its family, format and source: the base and its conditioners.

Known by slot ("base", "text_encoder", "vae", ...). Nothing is opened here; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outsize.base.errors import RecipeError
from outsize.families.protocol import FAMILIES, BaseFamily, Component, ImageCodec, TextEncoder
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import Format, make_format

if TYPE_CHECKING:
    from outsize.recipes.recipe import ComponentChoice, FormatChoice, Recipe

BASE = "base"
Kind = Literal["base", "text", "image"]


@dataclass(frozen=True)
class Part:
    """One model of a recipe.

    folder: its place in a diffusers repository. tokenizer: that of its tokenizer, for text encoders.
    """

    slot: str
    kind: Kind
    family_name: str
    variant: str
    family: BaseFamily | TextEncoder | ImageCodec
    source: str
    revision: str | None
    folder: str
    tokenizer: str | None
    packing: Packing


def parts_of(recipe: Recipe) -> dict[str, Part]:
    """All models of a recipe by slot, the base first.

    Raises: RecipeError for names that no plug-in has, and for slots that the family does not know.
    """
    family: BaseFamily = FAMILIES.load(recipe.base.family)
    variant = recipe.base.variant
    if variant not in family.variants:
        raise RecipeError(
            f"{recipe.base.family} has no variant {variant!r}; it has {', '.join(family.variants)}"
        )
    components = family.components(variant)
    unknown = sorted(set(recipe.base.components) - {one.slot for one in components})
    if unknown:
        raise RecipeError(
            f"base.components names {', '.join(unknown)}, but {recipe.base.family} {variant} has "
            f"{', '.join(one.slot for one in components)}"
        )
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
        packing=assign(family.table(variant), _format(recipe.base.format), make_format("plain")),
    )
    return {BASE: base} | {one.slot: _component_part(recipe, one) for one in components}


def of_kind(parts: dict[str, Part], kind: Kind) -> Iterator[Part]:
    """The parts of one kind, in the order in which they are used."""
    return (part for part in parts.values() if part.kind == kind)


def _component_part(recipe: Recipe, component: Component) -> Part:
    family: TextEncoder | ImageCodec = FAMILIES.load(component.family)
    choice: ComponentChoice = recipe.base.component(component.slot)
    chosen = _format(recipe.base.component_format(component.slot, component.kind))
    # a codec is small and its convolutions decide the colours: it keeps the precision of its file
    plain = make_format("plain", {"dtype": "fp32" if component.kind == "image" else "bf16"})
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
        packing=assign(family.table(component.variant), chosen, plain),
    )


def _format(choice: FormatChoice) -> Format:
    return make_format(choice.name, choice.options)
