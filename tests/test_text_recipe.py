"""The recipe's section for texts: what it takes and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outsize.recipes.text import TextChoice, TextSet


def choice(*sets: dict[str, Any], **others: Any) -> TextChoice:
    return TextChoice.model_validate({"sets": list(sets), **others})


def test_a_set_needs_no_more_than_a_path_and_columns_may_be_a_word_or_a_list() -> None:
    made = choice({"path": "a.jsonl"}, {"path": "b", "prompt": "ask", "completion": "say"})
    assert made.sets[1].prompt == ("ask",)
    assert made.sets[0] == TextSet.model_validate(made.sets[0].model_dump(mode="json"))
    two = choice({"path": "b", "prompt": ["instruction", "input"], "completion": "output"})
    assert two.sets[0].prompt == ("instruction", "input")


@pytest.mark.parametrize(
    ("sets", "others", "said"),
    [
        ([], {}, "at least 1"),
        ([{"path": "a.csv"}], {}, ".csv is not read; convert it to .jsonl"),
        ([{"path": "a", "text": "t", "messages": "m"}], {}, "columns are named for messages and text"),
        ([{"path": "a", "kind": "text", "prompt": "p"}], {}, "a set has one kind, here text"),
        ([{"path": "a", "is_held_out": True}], {}, "nothing to train on"),
        ([{"path": "a", "is_held_out": True, "share": 0.5}, {"path": "b"}], {}, "it has no share"),
        ([{"path": "a", "share": 0.5}], {}, "must add up to 1"),
        ([{"path": "a", "share": 1.0}, {"path": "b"}], {}, "must leave something"),
        ([{"path": "a"}], {"today": "yesterday"}, "must be a date such as 2026-01-01"),
        ([{"path": "a"}], {"window": 4}, "greater than or equal to 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    sets: list[dict[str, Any]], others: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        choice(*sets, **others)
    assert said in str(caught.value)


def test_every_field_is_described() -> None:
    for section in (TextSet, TextChoice):
        assert all(field.description for field in section.model_fields.values())
