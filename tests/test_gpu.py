"""On a real card: the same promises as on the CPU, with streams, events and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import adapter_of, checkpoint_bytes, train_here, write_recipe
from tiny import write_tiny

pytestmark = pytest.mark.gpu

FORMATS: tuple[Any, ...] = ("nf4", {"name": "nf4", "scales": "double"}, "int4", "plain")
DEVICE = "cuda"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny(family, "tiny", root / family) for family in ("flux1", "flux2")}


@pytest.mark.parametrize("family", ["flux1", "flux2"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_streamed_training_equals_resident_training_bit_for_bit_on_a_card(
    models: dict[str, Path], family: str, fmt: Any, tmp_path: Path
) -> None:
    found = []
    for kind in ("resident", "stream"):
        recipe = write_recipe(
            tmp_path, family, model=models[family], base={"format": fmt}, name=kind,
            train={"steps": 20}, placement={"kind": kind, "slots": 2},
            checkpoints={"every": 100},
        )  # fmt: skip
        _, run = train_here(recipe, DEVICE)
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_resume_on_a_card_gives_the_bytes_of_an_unbroken_run(
    models: dict[str, Path], tmp_path: Path, optimizer: str
) -> None:
    train = {"steps": 6, "accumulate": 2, "optimizer": optimizer}
    placement = {"kind": "stream", "slots": 2}
    whole = write_recipe(
        tmp_path, model=models["flux2"], name="whole", train=train, placement=placement
    )
    _, run = train_here(whole, DEVICE)
    for steps in (3, 6):
        part = write_recipe(
            tmp_path, model=models["flux2"], name="part", train=train | {"steps": steps},
            placement=placement,
        )  # fmt: skip
        _, resumed = train_here(part, DEVICE)
    assert checkpoint_bytes(resumed) == checkpoint_bytes(run)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A Flux.2 of real block shape but 2048 wide with 2 + 6 blocks (0.6 B parameters), tiny conditioners."""
    from outsize.families import flux2
    from outsize.plan import sizes

    sizes._cached_sizes.cache_clear()
    row = replace(
        flux2.VARIANTS["tiny"], num_heads=16, head_dim=128, axes=(32, 32, 32, 32), num_single=6
    )
    monkeypatch.setitem(flux2.VARIANTS, "tiny", row)
    yield write_tiny("flux2", "tiny", tmp_path / "reduced")
    sizes._cached_sizes.cache_clear()


def test_a_reduced_model_trains_streamed_as_resident_bit_for_bit(
    reduced: Path, tmp_path: Path
) -> None:
    found = []
    for kind in ("resident", "stream"):
        recipe = write_recipe(
            tmp_path, model=reduced, name=kind, data={"resolution": 256},
            adapter={"rank": 16}, train={"steps": 20, "learning_rate": 1e-3},
            placement={"kind": kind, "slots": 3}, checkpoints={"every": 100},
        )  # fmt: skip
        trained, run = train_here(recipe, DEVICE)
        found.append(checkpoint_bytes(run))
        assert trained.last is not None
        print(f"{kind}: {trained.last.seconds:.3f} s per step")  # noqa: T201
        values = adapter_of(run)
        assert all(torch.isfinite(one).all() for one in values.values())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["resident", "stream"])
@pytest.mark.parametrize("compiles", [True, False])
def test_previews_change_no_bit_on_a_card(
    models: dict[str, Path], tmp_path: Path, kind: str, *, compiles: bool
) -> None:
    """Compiled and recorded blocks, a codec opened beside them, an allocator that has seen other tensors."""
    previews = {"every": 2, "steps": 2, "width": 96, "height": 32, "decode": "now"}
    found = []
    for name, asked in (("without", {}), ("with", previews)):
        recipe = write_recipe(
            tmp_path, model=models["flux2"], name=name, previews=asked,
            train={"steps": 8, "compile": compiles}, placement={"kind": kind, "slots": 2},
        )  # fmt: skip
        _, run = train_here(recipe, DEVICE)
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    assert len(list(run.previews.glob("*/grid.png"))) == 5
