"""Preparing and synthesising on a card: the bytes that a processor gives, within the stated memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prepare_support import LAYOUTS, content_of, packing_for, prepare

from outsize.app.prepare import prepare_store
from outsize.app.synth import models_of, synthesise
from outsize.base.journal import Journal, read_journal
from outsize.base.table import ShapeTable, TensorSpec
from outsize.devices.protocol import open_device
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import assign
from outsize.formats.protocol import make_format
from outsize.weights.budget import DEVICE_BYTES
from outsize.weights.checkpoint_writer import NewTensor, write_checkpoint
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source

pytestmark = pytest.mark.gpu

# Blocks of several windows each, a long table that is written as it is read, and a tensor of one row.
TABLE = ShapeTable(
    (
        TensorSpec("table.weight", (40_000, 2048), "embed"),
        *(
            TensorSpec(f"b.{i}.up.weight", (12_288, 4096), "mlp", i, is_linear=True)
            for i in range(4)
        ),
        *(TensorSpec(f"b.{i}.norm", (4096,), "norm", i) for i in range(4)),
    )
)


def write_random(path: Path) -> Path:
    """A checkpoint of the table, 570 MB."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(16 * 2**20, generator=generator).bfloat16().view(torch.uint8).numpy().data
    tensors = [NewTensor(spec.name, "BF16", spec.shape) for spec in TABLE]
    (file,) = write_checkpoint(
        path,
        "x",
        tensors,
        lambda piece: values[: 2 * (piece.stop - piece.start)],
        shard_bytes=10**12,
        num_threads=4,
    )
    return file


@pytest.mark.parametrize("name", ["nf4", "int4", "plain"])
def test_a_card_prepares_the_bytes_of_a_processor_within_its_bound(
    tmp_path: Path, name: str
) -> None:
    """Twins, streams and events change no byte; the bound on the card's memory holds."""
    checkpoint, packing = write_random(tmp_path / "source"), packing_for(TABLE, name)
    expected = prepare(checkpoint, tmp_path / "cpu", TABLE, packing)
    device = open_device()
    assert device.kind != "cpu"
    device.reset_peak()
    journal = Journal(tmp_path / "journal.jsonl")
    with Source([checkpoint]) as source:
        store = prepare_store(
            table=TABLE,
            layouts=LAYOUTS,
            source=source,
            packing=packing,
            folder=tmp_path / "card",
            ram_budget_bytes=2**31,
            device=device.torch_device,
            journal=journal,
        )
    journal.close()
    assert content_of(store.folder) == content_of(expected.folder)
    done = list(read_journal(tmp_path / "journal.jsonl"))[-1]
    assert 0 < done["peak_device_bytes"] < DEVICE_BYTES
    print(done)  # noqa: T201 - the figures are what the run is for


def test_a_checkpoint_made_on_a_card_is_that_of_its_seed_and_prepares(tmp_path: Path) -> None:
    device = open_device()
    digests = []
    for number in range(2):
        path = tmp_path / str(number)
        models = models_of("flux2", "klein-4b@1+1", path, has_parts=False)
        synthesise(models, path, seed=3, shard_bytes=2 * 10**8, device=device)
        digests.append(content_of(path / "transformer"))
    assert digests[0] == digests[1]
    assert len(digests[0]) > 4, "several shards, their index and the config"
    family = FAMILIES.load("flux2")
    table = family.table("klein-4b@1+1")
    packing = assign(table, make_format("nf4"), make_format("plain"))
    with Source(locate_weights(str(path), sub_folder="transformer")) as source:
        spec = next(one for one in table if one.is_linear and one.block == 0)
        mapped = source.locate(family.layouts("klein-4b@1+1"), table)
        room = torch.empty(mapped.tensor_bytes(spec.name), dtype=torch.uint8)
        rows = mapped.read_rows(spec.name, 0, spec.shape[0], room)
        assert float(rows.float().std()) == pytest.approx(0.02, rel=0.01)
        store = prepare_store(
            table=table,
            layouts=family.layouts("klein-4b@1+1"),
            source=source,
            packing=packing,
            folder=tmp_path / "store",
            ram_budget_bytes=2**31,
            device=device.torch_device,
        )
    assert len(store.files) == 3
