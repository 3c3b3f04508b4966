"""Merging: every number against float64, every survivor measured as the whole matrices say, and clients read the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_support import decoded_by_bitsandbytes, write_plain, write_quantised
from run_support import train_here, write_recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_dialects import adapter_for, deltas
from tiny import bfl_names, write_tiny
from torch import Tensor

from outsize.app import _merge_fill
from outsize.app.adapter_files import read_adapter
from outsize.app.merge import REPORT, Merged, Order, merge
from outsize.base.errors import FormatError, SourceError
from outsize.cli.main import main
from outsize.dialects.protocol import AdapterWeights, LoraPair
from outsize.families.protocol import FAMILIES
from outsize.formats.protocol import make_format
from outsize.recipes.load import parse_recipe
from outsize.recipes.recipe import FormatChoice, Recipe
from outsize.weights import checkpoint_writer
from outsize.weights.header import build_header

CPU = torch.device("cpu")
# of bitsandbytes' matrices, beside the weight
STATES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "__nf4")


def recipe_for(family: str, source: Path, variant: str = "tiny", **base: Any) -> Recipe:
    is_text = FAMILIES.load(family).objective == "next_token"
    sets = {"sets": [{"path": "x.jsonl"}]} if is_text else {"sets": [{"folder": "x"}]}
    whole = {
        "name": "run",
        "base": {"family": family, "variant": variant, "source": str(source), **base},
        "data": sets,
    }
    return parse_recipe(json.dumps(whole), file="recipe.yaml", folder=source.parent)


def small_adapter(family: str, *, size: float, variant: str = "tiny") -> AdapterWeights:
    """A delta beside which bf16's steps are felt: about `size` of the weights' own."""
    generator = torch.Generator().manual_seed(9)
    table = FAMILIES.load(family).table(variant)
    pairs = {
        s.module: LoraPair(
            torch.randn(4, s.shape[1], generator=generator),
            torch.randn(s.shape[0], 4, generator=generator) * size / s.shape[1] ** 0.5,
        )
        for s in table.linears()
        if not s.module.endswith("to_k")
    }
    return AdapterWeights(pairs, 4, 2.0)


def ordered(into: Path, packed: FormatChoice | None = None, shard_bytes: int = 1 << 40) -> Order:
    return Order(into, packed, shard_bytes, CPU, offline=True, told={})


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: one for file in folder.rglob("*.safetensors") for name, one in load_file(file).items()
    }


def assert_rounded_sum(got: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    """Within half a step of the exact sum, and a few roundings of the fp32 in which it is made."""
    if delta is None or not bool(delta.any()):
        assert torch.equal(got, weight)
        return
    exact = weight.double() + delta
    info = torch.finfo(weight.dtype)
    half = info.eps * exact.abs().clamp(min=info.smallest_normal) / 2
    made = 3e-7 * (weight.double().abs() + delta.abs().max())
    assert bool(((got.double() - exact).abs() <= half + made).all())


@pytest.fixture(autouse=True)
def _cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end within rows, and windows of few rows: a real matrix is cut so as well."""
    monkeypatch.setattr(checkpoint_writer, "PIECE_BYTES", 2 * 1337)
    monkeypatch.setattr(_merge_fill, "_WINDOW_ELEMENTS", 500)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["diffusers", "bfl"])
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_every_weight_is_the_exact_sum_rounded_once_and_the_rest_is_copied(
    family: str, layout: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Under the source's own names: in the original's fused matrices, the rows of a part without adapter stay."""
    folder = write_tiny(family, "tiny", tmp_path / "model", layout=layout, dtype=dtype)
    source = folder / f"{family}-tiny.safetensors" if layout == "bfl" else folder
    adapter = small_adapter(family, size=0.05)
    made = merge(
        recipe_for(family, source), adapter, ordered(tmp_path / "out", shard_bytes=200_000)
    )
    before = tensors_in(folder / "transformer") if layout == "diffusers" else load_file(source)
    after = tensors_in(tmp_path / "out")
    table = FAMILIES.load(family).table("tiny")
    found = {f"{name}.weight": one for name, one in deltas(adapter).items()}
    whole = {s.name: found.get(s.name, torch.zeros(s.shape).double()) for s in table}
    named = bfl_names(family, whole) if layout == "bfl" else whole
    assert set(after) == set(before)
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        assert_rounded_sum(after[name], weight, named[name])
    assert made.num_bytes == sum(
        p.stat().st_size for p in (tmp_path / "out").rglob("*.safetensors")
    )
    if layout == "diffusers":
        made_config = (tmp_path / "out" / "transformer" / "config.json").read_text()
        assert json.loads(made_config) == json.loads(
            (folder / "transformer" / "config.json").read_text()
        )
        assert (
            tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
        ).exists()
    else:
        assert (tmp_path / "out" / source.name).exists()


def survival(D: Tensor, S: Tensor) -> dict[str, float]:
    """The three figures, from whole matrices."""
    D, S = D.double().flatten(), S.double().flatten()
    ratio = float(S.norm() / D.norm())
    return {
        "delta_norm": float(D.norm()),
        "ratio": ratio,
        "cosine": float(D @ S / (D.norm() * S.norm())),
        "share": float(D @ S / (D @ D)),
    }


def test_the_report_says_of_every_module_what_the_rounding_left(tmp_path: Path) -> None:
    """A delta of a hundredth of a bf16 step is mostly gone from the single weight, and mostly there on average."""
    folder = write_tiny("flux2", "tiny", tmp_path / "model")
    adapter = small_adapter("flux2", size=2e-3)
    made = merge(recipe_for("flux2", folder), adapter, ordered(tmp_path / "out"))
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    before, after = tensors_in(folder / "transformer"), tensors_in(tmp_path / "out")
    (way,) = report["modules"]
    assert set(report["modules"][way]) == set(adapter.pairs)
    shares = []
    for module, told in report["modules"][way].items():
        name = f"{module}.weight"
        S = after[name].double() - before[name].double()
        assert told == pytest.approx(survival(deltas(adapter)[module], S), rel=1e-4)
        shares.append(told["share"])
    assert made.meter.overall(way).share == pytest.approx(report["survived"][way]["share"])
    assert 0.5 < made.meter.overall(way).cosine < 0.999
    assert str(tmp_path) not in (tmp_path / "out" / REPORT).read_text()


def test_peft_merges_to_the_same_weights(tmp_path: Path) -> None:
    """In fp32, where neither side's rounding is felt: the client's own merge_and_unload."""
    from peft import PeftModel

    from outsize.base.layout import Layout
    from outsize.export.export import export_adapter

    family = "llama"
    folder = write_plain(family, tmp_path / "model", torch.float32)
    adapter = small_adapter(family, size=0.05)
    export_adapter(adapter, "peft", (Layout("client"),), tmp_path / "peft", {"base": "llama.tiny"})
    merge(recipe_for(family, folder), adapter, ordered(tmp_path / "out"))
    theirs = upstream_of(folder)
    merged = PeftModel.from_pretrained(theirs, tmp_path / "peft").merge_and_unload()
    ours = upstream_of(tmp_path / "out")
    wanted = dict(merged.state_dict())
    for name, one in ours.state_dict().items():
        assert torch.allclose(one, wanted[name], rtol=1e-5, atol=1e-6), name
    ids = torch.arange(12)[None] % 50
    with torch.no_grad():
        got, base = ours(ids).logits, upstream_of(folder)(ids).logits
        assert torch.allclose(got, merged(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, base, rtol=1e-2)


def upstream_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="cpu").eval()


def packed_and_decoded(options: Mapping[str, Any], rows: Tensor) -> Tensor:
    fmt = make_format("nf4", options)
    encoder = fmt.encoder(tuple(rows.shape))
    encoder.push(rows)
    return fmt.decode(encoder.finish(), tuple(rows.shape), torch.float32)


@pytest.mark.parametrize("scales", ["fp32", "double"])
@pytest.mark.parametrize("family", ["llama", "mistral3"])
def test_a_packed_merge_is_read_by_transformers_with_bitsandbytes(
    family: str, scales: str, tmp_path: Path
) -> None:
    """Every matrix as the format packs the exact sum; what is not packed in bf16, added to in fp32 and rounded."""
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    folder = write_plain(family, tmp_path / "model")
    adapter = small_adapter(family, size=0.3)
    choice = FormatChoice(name="nf4", options={"scales": scales})
    merge(recipe_for(family, folder), adapter, ordered(tmp_path / "out", choice, 60_000))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_use_double_quant"] == (scales == "double")
    got = decoded_by_bitsandbytes(family, tmp_path / "out")
    before = decoded_by_bitsandbytes(family, folder)
    assert {name for name in got if not name.endswith(STATES)} == set(before)
    num_packed = 0
    table, found = FAMILIES.load(family).table("tiny"), deltas(adapter)
    for name, weight in before.items():
        ours = name if name in table.by_name else name.replace("model.language_model.", "model.")
        module = ours.removesuffix(".weight")
        spec = table.by_name.get(ours)  # None for a head that is the token table
        if (
            spec is not None
            and spec.is_linear
            and spec.block is not None
            and spec.shape[1] % 64 == 0
        ):
            num_packed += 1
            whole = weight.float() + found[module].float()
            wanted = packed_and_decoded({"scales": scales}, whole)
            assert torch.equal(got[name].float(), wanted.bfloat16().float()), name
        else:
            assert_rounded_sum(got[name], weight, found.get(module))
    assert num_packed > 3


def test_a_delta_smaller_than_a_step_survives_from_the_whole_weights_and_not_from_the_packed_ones(
    tmp_path: Path,
) -> None:
    """Why the sum is packed from the unpacked source: on the grid, what moves by less than half a step moves back.

    The figures are those of whole matrices.
    """
    folder = write_tiny("flux2", "tiny", tmp_path / "model")
    adapter = small_adapter("flux2", size=0.01)
    made = merge(
        recipe_for("flux2", folder), adapter, ordered(tmp_path / "out", FormatChoice(name="nf4"))
    )
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    whole, again = _merge_fill.FROM_WHOLE, _merge_fill.FROM_PACKED
    assert made.meter.overall(whole).share > 0.8
    assert made.meter.overall(again).share < 0.3
    before = tensors_in(folder / "transformer")
    for module, D in list(deltas(adapter).items())[:6]:
        weight, delta = before[f"{module}.weight"].float(), D.float()
        packed = packed_and_decoded({}, weight)
        for way, start in ((whole, weight), (again, packed)):
            S = packed_and_decoded({}, start + delta) - packed
            assert report["modules"][way][module] == pytest.approx(survival(D, S), rel=1e-4)


def test_a_base_in_4_bits_is_merged_into_16_as_bitsandbytes_decodes_it(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    plain = write_plain("llama", tmp_path / "plain")
    folder = write_quantised("llama", plain, tmp_path / "4bit", is_double=True)
    adapter = small_adapter("llama", size=0.05)
    recipe = recipe_for("llama", folder, format={"name": "nf4", "scales": "double"})
    merge(recipe, adapter, ordered(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    decoded = decoded_by_bitsandbytes("llama", folder)
    got = tensors_in(tmp_path / "out")
    assert set(got) == {one for one in decoded if not one.endswith(STATES)} - {"lm_head.weight"}
    for name, weight in got.items():
        delta = deltas(adapter).get(name.removesuffix(".weight"))
        assert_rounded_sum(weight, decoded[name].to(weight.dtype), delta)
    packed = ordered(tmp_path / "again", FormatChoice(name="nf4", options={"scales": "double"}))
    merge(recipe, adapter, packed)
    again = decoded_by_bitsandbytes("llama", tmp_path / "again")
    name = "model.layers.0.mlp.down_proj.weight"
    whole = decoded[name].float() + deltas(adapter)[name.removesuffix(".weight")].float()
    wanted = packed_and_decoded({"scales": "double"}, whole).bfloat16()
    assert torch.equal(again[name].bfloat16(), wanted)


def test_a_merge_is_whole_or_not_there_and_what_cannot_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny("flux2", "tiny", tmp_path / "model")
    recipe, adapter = recipe_for("flux2", folder), small_adapter("flux2", size=0.1)
    with pytest.raises(
        FormatError, match="no other program reads a checkpoint in int4; merge into 16"
    ):
        merge(recipe, adapter, ordered(tmp_path / "out", FormatChoice(name="int4")))
    (tmp_path / "there").mkdir()
    with pytest.raises(SourceError, match="already there"):
        merge(recipe, adapter, ordered(tmp_path / "there"))
    count = 0

    def fail(*_: object) -> Any:
        nonlocal count
        count += 1
        if count > 40:
            raise OSError("disk gone")
        return real(*_)  # type: ignore[arg-type]  # as it was called

    real = _merge_fill.PlainFill._merged
    monkeypatch.setattr(_merge_fill.PlainFill, "_merged", fail)
    with pytest.raises(OSError, match="disk gone"):
        merge(recipe, adapter, ordered(tmp_path / "out"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "there"]


def test_weights_in_few_bits_that_nothing_can_be_added_to_are_named(tmp_path: Path) -> None:
    folder = write_tiny("flux2", "tiny", tmp_path / "model")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = "transformer_blocks.0.attn.to_q.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(SourceError, match=rf"1 weights to merge into .*\n  {name} is F8_E4M3"):
        merge(
            recipe_for("flux2", folder), small_adapter("flux2", size=0.1), ordered(tmp_path / "out")
        )


def test_merging_takes_little_memory_beside_a_checkpoint_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """269 MB of weights, in files that take no disk: four threads' pieces and windows, and the adapter."""
    monkeypatch.setattr(checkpoint_writer, "PIECE_BYTES", 4 * 2**20)
    monkeypatch.setattr(_merge_fill, "_WINDOW_ELEMENTS", 2**18)
    table = FAMILIES.load("llama").table("smollm2-135m")
    rows, begin = [], 0
    for spec in table:
        rows.append((spec.name, "BF16", spec.shape, begin, begin + 2 * spec.num_elements))
        begin += 2 * spec.num_elements
    source = tmp_path / "model.safetensors"
    source.write_bytes(build_header(rows, {}, alignment=8))
    with source.open("rb+") as file:
        file.truncate(source.stat().st_size + begin)
    adapter = small_adapter("llama", size=0.1, variant="smollm2-135m")
    made: Merged = merge(
        recipe_for("llama", source, "smollm2-135m"), adapter, ordered(tmp_path / "out")
    )
    factors = 4 * sum(p.A.numel() + p.B.numel() for p in adapter.pairs.values())
    assert begin > 260e6
    assert made.growth_bytes < 120e6 + factors
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        name = "model.layers.29.mlp.up_proj"
        wanted = deltas(adapter)[name].bfloat16()
        # made in fp32: an exact tie may fall to the other side
        assert (file.get_tensor(f"{name}.weight") != wanted).float().mean() < 1e-3


def test_the_command_merges_a_run_and_what_it_wrote_is_a_base_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained, merged, and drawn by the merged base alone from the same recipe with another source."""
    recipe = write_recipe(tmp_path, "flux2")
    train_here(recipe)
    assert main(["merge", str(recipe), "--into", str(tmp_path / "merged"), "--offline"]) == 0
    assert "rounded to the type of the weight" in capsys.readouterr().out
    report = json.loads((tmp_path / "merged" / REPORT).read_text())
    assert report["adapter"]["step"] == "6"
    file = tmp_path / "x.safetensors"
    assert main(["export", str(recipe), "--to", "kohya", "--out", str(file)]) == 0
    half = ["--adapter", f"{file}:0.5"]
    into = ["--into", str(tmp_path / "other"), "--format", "nf4", "--offline"]
    assert main(["merge", str(recipe), *half, *half, *into]) == 0
    assert "packed again from the packed base's sum" in capsys.readouterr().out
    report = json.loads((tmp_path / "other" / REPORT).read_text())
    digest = read_adapter(file, "flux2", "tiny").digest
    assert report["adapters"] == [{"sha256": digest, "dialect": "kohya", "weight": 0.5}] * 2
    parts = {"text_encoder": {"source": "./model"}, "vae": {"source": "./model"}}
    for name in ("merged", "other"):
        again = write_recipe(
            tmp_path, "flux2", model=tmp_path / name, name=f"{name}-run", base={"components": parts}
        )
        assert main(["sample", str(again), "-p", "a red picture", "--base", "--offline"]) == 0


def test_merge_refuses_an_adapter_of_another_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from outsize.export.export import export_adapter

    recipe = write_recipe(tmp_path, "flux2")
    layouts = FAMILIES.load("flux1").layouts("tiny")
    file = tmp_path / "x.safetensors"
    export_adapter(adapter_for("flux1", "tiny"), "kohya", layouts, file, {"base": "flux1.tiny"})
    into = ["--into", str(tmp_path / "out")]
    assert main(["merge", str(recipe), *into, "--adapter", str(file)]) == 9
    assert "it is an adapter of flux1.tiny" in capsys.readouterr().err
