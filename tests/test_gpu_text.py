"""Language bases on a real card: wherever blocks, block inputs and the vocabulary lie, the same bytes come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from language_support import NAMES
from run_support import checkpoint_bytes, train_here
from text_run_support import write_language, write_text_recipe

from outsize.base.journal import read_journal

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"kind": "resident"},
    {"kind": "stream", "slots": 2},
    {"kind": "resident", "vocabulary_on_host": True},
    {"kind": "stream", "slots": 2, "vocabulary_on_host": True, "offload_inputs": True},
)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("family", NAMES)
def test_placement_changes_no_byte_of_a_language_run(
    family: str, mode: str, tmp_path: Path
) -> None:
    """Measured losses are equal as well, the base's after the adapter's blocks were compiled among them."""
    model, found, measured = write_language(tmp_path / "model", family), [], []
    for number, placement in enumerate(PLACEMENTS):
        recipe = write_text_recipe(
            tmp_path,
            family,
            model=model,
            name=f"run{number}",
            train={"steps": 8, "accumulate": 2, "compile": mode == "compiled"},
            placement=placement,
            evaluate={"every": 4},
        )
        _, run = train_here(recipe, DEVICE)
        found.append(checkpoint_bytes(run)["adapter.safetensors"])
        events = read_journal(run.journal)
        measured.append([one["loss"] for one in events if one["event"] == "evaluated"])
    assert all(one == found[0] for one in found[1:])
    assert all(one == measured[0] for one in measured[1:])


def test_a_killed_and_resumed_language_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    """From whole checkpoints, through other placements."""
    model = write_language(tmp_path / "model", "qwen3_5")
    whole = write_text_recipe(tmp_path, "qwen3_5", model=model, name="whole", train={"steps": 8})
    _, run = train_here(whole, DEVICE)
    expected = checkpoint_bytes(run)["adapter.safetensors"]
    for steps, placement in ((4, PLACEMENTS[3]), (8, PLACEMENTS[0])):
        recipe = write_text_recipe(
            tmp_path, "qwen3_5", model=model, name="parts", train={"steps": steps},
            placement=placement,
        )  # fmt: skip
        _, run = train_here(recipe, DEVICE)
    assert checkpoint_bytes(run)["adapter.safetensors"] == expected
