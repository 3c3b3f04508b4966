"""Checkpoints in 4 bits in the engine: logits of transformers with bitsandbytes, a whole recipe, and the memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase
from language_support import NAMES, logits_of, rows, upstream_class
from quantised_support import (
    packing_of,
    source_of,
    want,
    write_plain,
    write_quantised,
)
from run_support import environment, outsize, site_of, write_recipe
from safetensors.torch import load_file, save_file

from outsize.app.planning import quantised_sources
from outsize.app.prepare import How, prepare_in_cache
from outsize.base.errors import RecipeError
from outsize.families.protocol import FAMILIES
from outsize.plan.work import work_of
from outsize.recipes.load import load_recipe

pytest.importorskip("bitsandbytes", exc_type=ImportError)

# Kept plain, hence in bf16, where bitsandbytes would decode to fp32.
THIN = tuple(f"layers.{i}.linear_attn.in_proj_{kind}" for i in range(4) for kind in "ab")


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_with_bitsandbytes(
    tmp_path: Path, name: str, placement: str
) -> None:
    """Mixed, double scales; all in fp32, where the two engines differ in the order of sums alone.

    In eval mode bitsandbytes' own product would round to bf16 on processors that have it.
    """
    plain = write_plain(name, tmp_path / "plain")
    folder = write_quantised(
        name,
        plain,
        tmp_path / "4bit",
        is_double=True,
        skip=("lm_head", "layers.1.mlp.down_proj", *THIN),
        dtype=torch.float32,
    )
    with source_of(folder) as source:
        one = want(source, name, tmp_path / "cache", packing_of(name, scales="double"))
        store = prepare_in_cache(one, How(2**30))
    assert len(one.packing.left_plain) == 1
    base, batch = TinyBase(FAMILIES.load(name), "tiny", one.packing, store), rows([[24], [24]])
    theirs = upstream_class(name).from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    theirs.train()
    model = base.open(placement)
    with torch.no_grad():
        model.begin("forward")
        ours = logits_of(base, model.module, batch)
        expected = theirs(input_ids=batch["input_ids"], use_cache=False).logits
    model.close()
    assert expected.std() > 0.1, "a model without effect would pass every comparison"
    assert float((ours - expected).norm() / expected.norm()) < 1e-5


# ---------------------------------------------------------------- a recipe, whose conditioner is such a checkpoint


def quantise_text_encoder(folder: Path) -> list[str]:
    """Put a text encoder's linears into 4 bits as save_pretrained writes them, but those of the second layer."""
    from bitsandbytes.functional import quantize_4bit

    file = folder / "model.safetensors"
    tensors = load_file(file)
    linears = [name for name, one in tensors.items() if ".layers." in name and one.ndim == 2]
    left = [name for name in linears if ".layers.1." in name]
    for name in set(linears) - set(left):
        codes, state = quantize_4bit(tensors[name], quant_type="nf4", compress_statistics=True)
        tensors[name] = codes
        tensors |= {f"{name}.{key}": one for key, one in state.as_dict(packed=True).items()}
    save_file(tensors, file)
    return left


def test_a_recipe_takes_such_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    """The model is built as its store is packed, whether that was made now or found there."""
    recipe = write_recipe(tmp_path)
    left = quantise_text_encoder(tmp_path / "model" / "text_encoder")
    said = outsize("prepare", recipe, "--device", "cpu")
    assert said.returncode == 0, said.stderr
    assert (
        f"matrices taken as they are (nf4 in groups of 64, double scales), {len(left)} left unpacked"
        in said.stdout
    )
    for _ in range(2):
        with site_of(recipe) as (site, _), site.opened("text_encoder") as model:
            packing = site.parts["text_encoder"].packing
            assert len(packing.left_plain) == len(left)
            assert not model.without_weights()
            ids = torch.zeros(1, 4, dtype=torch.long)
            model.begin("forward")
            with torch.no_grad():
                hidden = model.module(input_ids=ids).last_hidden_state
            assert bool(hidden.isfinite().all())


def test_a_plan_counts_such_a_checkpoint_as_its_store_is(tmp_path: Path) -> None:
    """Known from headers and states, before torch is imported; a source that is not here is planned by its table."""
    path = write_recipe(tmp_path)
    left = quantise_text_encoder(tmp_path / "model" / "text_encoder")
    recipe = load_recipe(path)
    found = quantised_sources(recipe)
    assert set(found) == {"text_encoder"}
    work = work_of(recipe, has_gpu=True, found=found)
    with site_of(path) as (site, _):
        store = site.store("text_encoder")
    assert work.sizes_of("text_encoder").store_bytes == store.nbytes
    assert work_of(recipe, has_gpu=True).sizes_of("text_encoder").store_bytes < store.nbytes
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch', 'torch' in sys.modules))\n"
        "from outsize.cli.main import main; main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, "plan", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    said = " ".join(told.stdout.split())
    assert f"and keep {len(left)} linears of its blocks plain; so does the store" in said, told
    assert said.endswith("torch False")
    moved = (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert moved.exists()
    assert quantised_sources(recipe) == {}


def test_a_recipe_with_another_format_is_refused_with_its_code(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        base={"components": {"text_encoder": {"format": "int4"}}},
    )
    quantise_text_encoder(tmp_path / "model" / "text_encoder")
    said = outsize("prepare", recipe, "--device", "cpu")
    assert said.returncode not in (0, 1, RecipeError.exit_code)
    assert "is nf4, which int4 cannot take: set `format` to nf4" in said.stderr
    assert "Traceback" not in said.stderr


# ---------------------------------------------------------------- memory, in a process of its own

MEASURE = """
import json, sys
from pathlib import Path
import torch
from prepare_support import packing_for, prepare
from quantised_support import write_sparse_quantised
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.budget import MemoryWatch

folder, budget = Path(sys.argv[1]), int(sys.argv[2])
table = ShapeTable((
    *(TensorSpec(f"b.{i}.up.weight", (6144, 16384), "mlp", i, is_linear=True) for i in range(4)),
    TensorSpec("head.weight", (48000, 2048), "head", is_linear=True),
))
source_bytes = write_sparse_quantised(folder / "x.safetensors", table)
packing = packing_for(table, scales=sys.argv[3])
with MemoryWatch(0.005) as watch:
    store = prepare(folder / "x.safetensors", folder / "s", table, packing, budget_bytes=budget)
print(json.dumps({"growth": watch.growth_bytes, "source": source_bytes, "store": store.nbytes}))
"""


@pytest.mark.parametrize("scales", ["fp32", "double"])
def test_taking_250_mb_stays_within_a_tight_budget(tmp_path: Path, scales: str) -> None:
    """Codes pass through slabs; a head of 48000 rows, which is kept plain, is decoded row by row."""
    budget = 2**20 * (64 + 2 * 57 + 24)  # overhead, twice the largest matrix in fp32 scales, slabs
    paths = [str(Path(__file__).parent), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(budget), scales],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()  # pytest keeps the folders of three runs
    assert result.returncode == 0, result.stderr
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert figures["source"] > 250e6
    assert figures["growth"] < 160e6, "far from what the file holds, let alone what it decodes to"
