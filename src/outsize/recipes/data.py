"""What `data` of a recipe may be: one section for each kind of thing that is learned from.

A person does not say which kind it is: the keys tell, so faults are told of the section that knows most of them. Whether
the base can learn from it is judged where families are known (plan/tasks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Discriminator, Tag

from outsize.recipes.pictures import PictureChoice
from outsize.recipes.section import Section, sections_in
from outsize.recipes.text import TextChoice

# By the word for it in messages; the first is taken for data whose keys say nothing.
DATA_KINDS: Mapping[str, type[Section]] = {"pictures": PictureChoice, "text": TextChoice}


def kind_of_keys(keys: Iterable[str]) -> str:
    """The kind whose section, with those inside it, knows most of some keys."""
    found = set(keys)
    return max(DATA_KINDS, key=lambda kind: len(found & _known(DATA_KINDS[kind])))


def kind_of_data(value: object) -> str:
    """The kind of data, written out or read already."""
    for kind, section in DATA_KINDS.items():
        if isinstance(value, section):
            return kind
    return kind_of_keys(_keys(value))


def _keys(value: object) -> set[str]:
    if isinstance(value, Mapping):
        inner = (_keys(one) for one in value.values() if isinstance(one, list | tuple))
        return {str(key) for key in value}.union(*inner)
    if isinstance(value, list | tuple):
        return set().union(*(_keys(one) for one in value))
    return set()


def _known(section: type[Section]) -> set[str]:
    inner = (
        _known(one)
        for info in section.model_fields.values()
        for one in sections_in(info.annotation)
    )
    return set(section.model_fields).union(*inner)


DataChoice = Annotated[
    Annotated[PictureChoice, Tag("pictures")] | Annotated[TextChoice, Tag("text")],
    Discriminator(kind_of_data),
]
