"""Export: what lies on disk is the adapter, or nothing lies there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outsize.base.errors import AdapterError, RecipeError
from outsize.base.layout import Layout, Rule
from outsize.dialects.protocol import DIALECTS, AdapterWeights, LoraPair
from outsize.export import export as export_module
from outsize.export.export import export_adapter, max_delta_difference, read_adapter_files

LAYOUTS = (
    Layout("ours"),
    Layout(
        "original",
        (
            Rule("blocks.{i}.q.weight", "layers.{i}.qk.weight", part=(0, 2)),
            Rule("blocks.{i}.k.weight", "layers.{i}.qk.weight", part=(1, 2)),
            Rule("blocks.{i}.out.weight", "layers.{i}.proj.weight"),
        ),
    ),
)
FACTS = {"base": "flux2.dev", "source": "org/base-model", "recipe": "0123abcd"}


def adapter_of(*, alpha: float = 2.0, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    generator = torch.Generator().manual_seed(3)

    def factor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    names = ("blocks.0.q", "blocks.0.k", "blocks.0.out", "blocks.1.q")
    return AdapterWeights({name: LoraPair(factor(4, 6), factor(8, 4)) for name in names}, 4, alpha)


def target_in(folder: Path, dialect: str) -> Path:
    return folder / ("out" if DIALECTS.load(dialect).is_folder else "out.safetensors")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dialect", DIALECTS.names())
def test_an_export_is_read_back_without_any_difference(dialect: str, tmp_path: Path) -> None:
    """Alpha / rank is 1/2, so folding it into B is exact in every dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        adapter = adapter_of(dtype=dtype)
        target = target_in(tmp_path / str(dtype), dialect)
        exported = export_adapter(adapter, dialect, LAYOUTS, target, FACTS)
        assert exported.max_difference == 0.0
        assert exported.num_modules == 4
        assert exported.silent == ()
        assert exported.num_bytes == sum(path.stat().st_size for path in exported.files)
        again = DIALECTS.load(dialect).read(read_adapter_files(exported.files), LAYOUTS)
        assert max_delta_difference(adapter, again) == 0.0
        assert {pair.B.dtype for pair in again.pairs.values()} == {dtype}
        assert names_in(target.parent) == [target.name]


@pytest.mark.parametrize("dialect", ["diffusion_model", "diffusers"])
def test_a_scale_that_rounds_is_reported_with_its_difference(dialect: str, tmp_path: Path) -> None:
    adapter = adapter_of(alpha=1.7, dtype=torch.bfloat16)
    exported = export_adapter(adapter, dialect, LAYOUTS, tmp_path / "x.safetensors", FACTS)
    # Four products, B off by at most half a unit in the last of its 8 bits, and the largest factors there are.
    largest_A = max(float(pair.A.abs().max()) for pair in adapter.pairs.values())
    largest_B = max(float(pair.B.abs().max()) for pair in adapter.pairs.values()) * 1.7 / 4
    assert 0.0 < exported.max_difference <= 4 * largest_A * largest_B * 2**-8


@pytest.mark.parametrize("dialect", ["comfyui", "kohya"])
def test_a_scale_beside_the_factors_rounds_none_of_them(dialect: str, tmp_path: Path) -> None:
    """Only the scalar is fp32: 1.7 / 4 of a module, 3.4 / 8 of two that are fused."""
    adapter = adapter_of(alpha=1.7, dtype=torch.bfloat16)
    exported = export_adapter(adapter, dialect, LAYOUTS, tmp_path / "x.safetensors", FACTS)
    assert exported.max_difference == 0.0
    again = DIALECTS.load(dialect).read(read_adapter_files(exported.files), LAYOUTS)
    assert again.alpha == 1.7
    with safe_open(exported.files[0], "pt") as file:
        alphas = sorted(float(file.get_tensor(key)) for key in file.keys() if "alpha" in key)  # noqa: SIM118 - no mapping
    assert alphas == pytest.approx([1.7, 1.7, 3.4], rel=1e-7)


def test_the_difference_of_deltas_is_that_of_the_whole_matrices() -> None:
    before, after = adapter_of(), adapter_of(alpha=3.0)
    other = AdapterWeights({**after.pairs, "blocks.0.q": before.pairs["blocks.0.out"]}, 4, 3.0)
    wanted = max(
        float(
            (
                before.pairs[name].B.double() @ before.pairs[name].A.double() / 2
                - other.pairs[name].B.double() @ other.pairs[name].A.double() * 0.75
            )
            .abs()
            .max()
        )
        for name in before.pairs
    )
    assert max_delta_difference(before, other) == pytest.approx(wanted, rel=1e-12)


def test_a_module_that_is_missing_counts_as_its_whole_delta() -> None:
    whole = adapter_of()
    less = AdapterWeights({n: p for n, p in whole.pairs.items() if n != "blocks.1.q"}, 4, 2.0)
    lost = whole.pairs["blocks.1.q"]
    wanted = float((lost.B.double() @ lost.A.double() / 2).abs().max())
    assert max_delta_difference(whole, less) == pytest.approx(wanted, rel=1e-12)
    assert max_delta_difference(less, whole) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("dialect", DIALECTS.names())
def test_the_header_states_what_the_adapter_is_and_no_path(dialect: str, tmp_path: Path) -> None:
    exported = export_adapter(adapter_of(), dialect, LAYOUTS, target_in(tmp_path, dialect), FACTS)
    tensors = next(path for path in exported.files if path.suffix == ".safetensors")
    with safe_open(tensors, "pt") as file:
        metadata = file.metadata()
    version = metadata.pop("outsize.version")
    assert version[0].isdigit()
    theirs = {key: metadata.pop(key) for key in list(metadata) if key.startswith("ss_")}
    assert theirs == (
        {"ss_network_dim": "4", "ss_network_alpha": "2"} if dialect == "kohya" else {}
    )
    assert metadata == {
        "format": "pt",
        "outsize.base": "flux2.dev",
        "outsize.source": "org/base-model",
        "outsize.recipe": "0123abcd",
        "outsize.dialect": dialect,
        "outsize.rank": "4",
        "outsize.alpha": "2",
    }
    for path in exported.files:
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "facts",
    [
        {"base": "flux2.dev", "source": "/data/models/flux2"},
        {"base": "flux2.dev", "source": "C:\\models\\flux2"},
        {"base": "flux2.dev", "source": "~/flux2"},
        {"base": "flux2.dev", "source": "a/b/c"},
        {"base": "flux2.dev", "source": "../flux2"},
        {"base": "flux2.dev", "owner": "someone"},
        {"recipe": "0123"},
    ],
)
def test_metadata_that_is_no_name_is_refused(facts: dict[str, str], tmp_path: Path) -> None:
    """A shared file must not tell where somebody's disk keeps things."""
    with pytest.raises(AdapterError, match="each a plain name"):
        export_adapter(adapter_of(), "diffusers", LAYOUTS, tmp_path / "x.safetensors", facts)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("dialect", DIALECTS.names())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused_by_module(
    dialect: str, value: float, tmp_path: Path
) -> None:
    adapter = adapter_of()
    adapter.pairs["blocks.0.k"].B[0, 0] = value
    adapter.pairs["blocks.1.q"].A[0, 0] = value
    with pytest.raises(AdapterError, match=r"2 of 4 modules .*blocks\.0\.k, blocks\.1\.q"):
        export_adapter(adapter, dialect, LAYOUTS, target_in(tmp_path, dialect), FACTS)
    assert names_in(tmp_path) == []


def test_an_adapter_that_changes_nothing_is_refused_and_a_silent_module_is_told(
    tmp_path: Path,
) -> None:
    """B starts at zero: an adapter that was never trained looks just like this."""
    adapter = adapter_of()
    for name, pair in adapter.pairs.items():
        if name != "blocks.0.q":
            pair.B.zero_()
    exported = export_adapter(
        adapter, "diffusion_model", LAYOUTS, tmp_path / "x.safetensors", FACTS
    )
    assert exported.silent == ("blocks.0.k", "blocks.0.out", "blocks.1.q")
    assert exported.max_difference == 0.0
    adapter.pairs["blocks.0.q"].B.zero_()
    with pytest.raises(AdapterError, match="all 4 modules of the adapter are zero"):
        export_adapter(adapter, "diffusion_model", LAYOUTS, tmp_path / "y.safetensors", FACTS)
    assert names_in(tmp_path) == ["x.safetensors"]


def test_a_scale_that_overflows_its_dtype_is_refused(tmp_path: Path) -> None:
    adapter = adapter_of(alpha=4 * 60000.0, dtype=torch.float16)
    with pytest.raises(AdapterError, match="overflowed"):
        export_adapter(adapter, "diffusers", LAYOUTS, tmp_path / "x.safetensors", FACTS)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("dialect", DIALECTS.names())
def test_a_file_that_reads_back_otherwise_is_never_given_out(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a dialect that changes one number is found before the old file is replaced."""
    target = target_in(tmp_path, dialect)
    if not DIALECTS.load(dialect).is_folder:
        target.write_bytes(b"the old file")
    real = export_module._read

    def changed(path: Path) -> Any:
        file = real(path)
        if path.suffix != ".json":
            key = next(
                key
                for key, tensor in file.tensors.items()
                if ("lora_B" in key or "lora_up" in key) and tensor[0, 0]
            )
            file.tensors[key][0, 0] *= 1.01
        return file

    monkeypatch.setattr(export_module, "_read", changed)
    with pytest.raises(AdapterError, match="differs from the trained one by"):
        export_adapter(adapter_of(), dialect, LAYOUTS, target, FACTS)
    assert names_in(tmp_path) == ([] if DIALECTS.load(dialect).is_folder else ["out.safetensors"])
    if target.is_file():
        assert target.read_bytes() == b"the old file"


def test_targets_that_do_not_suit_a_dialect_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(AdapterError, match="already there"):
        export_adapter(adapter_of(), "peft", LAYOUTS, tmp_path / "there", FACTS)
    for name in ("there", "adapter.pt"):
        with pytest.raises(AdapterError, match=r"must end in \.safetensors"):
            export_adapter(adapter_of(), "diffusers", LAYOUTS, tmp_path / name, FACTS)
    with pytest.raises(RecipeError, match="no dialect is called"):
        export_adapter(adapter_of(), "kohja", LAYOUTS, tmp_path / "x.safetensors", FACTS)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    exported = export_adapter(adapter_of(), "peft", LAYOUTS, tmp_path / "out", FACTS)
    for path in exported.files:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(AdapterError, match="torn or no adapter file"):
            read_adapter_files([path])


def test_an_exported_file_replaces_the_old_one_and_holds_the_new_adapter(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x.safetensors"
    export_adapter(adapter_of(), "diffusers", LAYOUTS, target, FACTS)
    export_adapter(adapter_of(alpha=4.0), "diffusers", LAYOUTS, target, FACTS)
    again = DIALECTS.load("diffusers").read(read_adapter_files([target]), LAYOUTS)
    assert max_delta_difference(adapter_of(alpha=4.0), again) == 0.0
    assert names_in(target.parent) == ["x.safetensors"]


def test_the_peft_configuration_names_modules_exactly(tmp_path: Path) -> None:
    """A list entry `out` would also match `blocks.0.out`; the expression must not."""
    import re

    adapter = AdapterWeights({"out": adapter_of().pairs["blocks.0.out"]}, 4, 2.0)
    exported = export_adapter(adapter, "peft", LAYOUTS, tmp_path / "x", FACTS)
    config = json.loads(exported.files[1].read_text())
    assert re.fullmatch(config["target_modules"], "out")
    assert not re.fullmatch(config["target_modules"], "blocks.0.out")


def test_dialects_and_export_are_imported_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from outsize.dialects.protocol import DIALECTS; import outsize.export.export; "
        "[DIALECTS.load(name) for name in DIALECTS.names()]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
