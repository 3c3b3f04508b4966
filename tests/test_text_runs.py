"""Language bases through the whole engine: one recipe, one store, one loop; checked against transformers and peft."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from language_support import NAMES
from run_support import checkpoint_bytes, killed_after_step, outsize, site_of, train_here
from text_run_support import write_language, write_talks, write_text_recipe
from torch import Tensor

from outsize.app.text_corpus import build_texts
from outsize.base.journal import read_journal
from outsize.runs.folder import RunFolder

ROLES = {"qwen3_5": ["attention", "mlp", "linear_attention"]}
EXACT = {"name": "plain", "dtype": "fp32"}  # bf16 weights as they are, so that others see the same


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_language(root / family, family) for family in NAMES}


def recipe_of(
    models: dict[str, Path], tmp_path: Path, family: str = "llama", **changes: Any
) -> Path:
    adapter = {"rank": 4, "roles": ROLES.get(family, ["attention", "mlp"])}
    changes["adapter"] = adapter | changes.get("adapter", {})
    return write_text_recipe(tmp_path, family, model=models[family], **changes)


def events(run: RunFolder | Path, name: str) -> list[dict[str, Any]]:
    journal = run.journal if isinstance(run, RunFolder) else run / "journal.jsonl"
    return [one for one in read_journal(journal) if one["event"] == name]


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NAMES)
def test_streamed_training_equals_resident_training_bit_for_bit(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """What is measured on the way is equal as well, and moves no number of what is trained."""
    found, measured = [], []
    for kind, every in (("resident", 3), ("stream", 3), ("stream", 100)):
        name = f"{kind}{every}"
        recipe = recipe_of(
            models,
            tmp_path,
            family,
            name=name,
            train={"steps": 8, "accumulate": 2},
            placement={"kind": kind, "slots": 2},
            evaluate={"every": every},
        )
        _, run = train_here(recipe)
        found.append(checkpoint_bytes(run)["adapter.safetensors"])
        measured.append(
            [(one["what"], one["step"], one["loss"]) for one in events(run, "evaluated")]
        )
    assert found[0] == found[1] == found[2]
    assert measured[0] == measured[1]
    assert [one[:2] for one in measured[0]] == [
        ("base", 0),
        ("adapter", 3),
        ("adapter", 6),
        ("adapter", 8),
    ]
    assert [one[1] for one in measured[2]] == [0, 8]
    assert measured[0][0][2] > measured[0][-1][2], "eight steps teach something"


@pytest.mark.slow
def test_a_run_killed_at_random_and_resumed_equals_an_unbroken_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """SIGKILL at any moment; the bytes of adapter and optimiser at the end are those of a run left alone."""
    whole = recipe_of(models, tmp_path, name="whole", train={"steps": 12})
    assert outsize("train", whole, "--offline").returncode == 0
    recipe = recipe_of(models, tmp_path, name="killed", train={"steps": 12})
    step = random.Random(3).randrange(3, 11)
    killed_after_step(step, recipe, "--offline")
    again = outsize("train", recipe, "--offline")
    assert again.returncode == 0, again.stderr
    runs = [RunFolder(tmp_path / "runs" / name) for name in ("whole", "killed")]
    one, other = (checkpoint_bytes(run) for run in runs)
    assert one["adapter.safetensors"] == other["adapter.safetensors"]
    assert one["optimizer.safetensors"] == other["optimizer.safetensors"]
    assert "Held-out text" in again.stdout
    last = [events(run, "evaluated")[-1]["loss"] for run in runs]
    assert last[0] == last[1]


def test_a_run_is_not_resumed_with_other_texts(models: dict[str, Path], tmp_path: Path) -> None:
    """The message says texts, not pictures."""
    recipe = recipe_of(models, tmp_path, train={"steps": 2})
    train_here(recipe)
    write_talks(tmp_path / "talks.jsonl", 20)
    recipe = recipe_of(models, tmp_path, train={"steps": 4})
    told = outsize("train", recipe, "--offline")
    assert told.returncode == 2
    assert "the texts changed since" in told.stderr


def test_a_token_counts_the_same_in_whichever_micro_batch_it_lies(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The same rows in one pass or in four, with unlike numbers of trained tokens: one loss, one gradient."""
    found = []
    for batch, accumulate in ((4, 1), (1, 4), (2, 2)):
        recipe = recipe_of(
            models,
            tmp_path,
            name=f"b{batch}",
            base={"format": EXACT},
            data={"pack": False},
            train={"steps": 1, "batch": batch, "accumulate": accumulate},
        )
        _, run = train_here(recipe)
        (step,) = events(run, "step")
        found.append((step["loss"], step["grad_norm"]))
    for loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-5)


def test_dora_with_an_average_on_a_language_base_is_the_same_streamed_and_measured_against_the_base(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The base is measured through the neutral adapter before and after: lengths of rows are put back as well."""
    found, losses = [], []
    for kind, steps in (("resident", 4), ("stream", 2), ("stream", 4)):
        recipe = recipe_of(
            models, tmp_path, "llama", name=kind, placement={"kind": kind, "slots": 2},
            adapter={"kind": "dora", "scaling": "sqrt_rank", "ranks": [{"roles": ["mlp"], "rank": 2}]},
            train={"steps": steps, "ema": 0.9, "optimizer": "prodigy", "learning_rate": 1.0},
            evaluate={"every": 1},
        )  # fmt: skip
        _, run = train_here(recipe)
        found.append(checkpoint_bytes(run))
        losses += [one["loss"] for one in events(run, "evaluated") if one["what"] == "base"]
    assert found[0] == found[2], "resumed after two steps, too"
    assert len(losses) == 4
    assert len(set(losses)) == 1
    adapted = [one["loss"] for one in events(run, "evaluated") if one["what"] == "adapter"]
    assert adapted[-1] != losses[0]


# --- what is measured, against transformers ------------------------------------------------------


def upstream(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def documents_of(site: Any) -> list[tuple[Tensor, Tensor]]:
    """Ids and shifted labels of every held-out document, by itself."""
    found = []
    for batch in build_texts(site).held_out(1000):
        rows = zip(batch.input_ids, batch.labels, batch.segments, strict=True)
        found += [
            (ids[segments == number], labels[segments == number])
            for ids, labels, segments in rows
            for number in range(int(segments.max()) + 1)
        ]
    return found


@pytest.mark.parametrize("family", NAMES)
def test_held_out_loss_is_that_of_transformers_on_each_document_alone(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """Packed rows, a tiled loss and streamed blocks against a plain forward of documents one by one."""
    recipe = recipe_of(models, tmp_path, family, base={"format": EXACT}, train={"steps": 2})
    _, run = train_here(recipe)
    (base,) = [one for one in events(run, "evaluated") if one["what"] == "base"]
    with site_of(recipe) as (site, _):
        documents = documents_of(site)
    model, nats, count = upstream(models[family]), 0.0, 0
    for ids, labels in documents:
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        is_trained = labels >= 0
        nats += float(
            torch.nn.functional.cross_entropy(
                logits[is_trained], labels[is_trained], reduction="sum"
            )
        )
        count += int(is_trained.sum())
    assert base["tokens"] == count > 0
    assert base["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert base["perplexity"] == pytest.approx(2.718281828459045 ** (nats / count), rel=1e-4)


# --- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe of each family, trained for a few steps on weights that transformers can hold exactly."""
    found = {}
    for family in NAMES:
        folder = tmp_path_factory.mktemp(f"trained-{family}")
        found[family] = recipe_of(
            models,
            folder,
            family,
            base={"format": EXACT},
            train={"steps": 6},
            compare={"temperature": 0, "max_tokens": 12},
        )
        train_here(found[family])
    return found


@pytest.mark.parametrize(
    "family",
    [one if one == "gemma4" else pytest.param(one, marks=pytest.mark.slow) for one in NAMES],
)
def test_an_exported_adapter_writes_in_transformers_and_peft_what_it_writes_here(
    models: dict[str, Path], trained: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """Greedily, token by token, through a cache here and there; and the base alone likewise."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    recipe, folder = trained[family], tmp_path / "peft"
    assert outsize("export", recipe, "--out", folder).returncode == 0
    samples = recipe.parent / "runs" / "run" / "samples"
    written = []
    for extra in ((), ("--base",)):
        told = outsize("sample", recipe, "-p", "a red cat", "--offline", *extra)
        assert told.returncode == 0, told.stderr
        newest = max(samples.glob("*.json"))
        written.append(json.loads(newest.read_text(encoding="utf-8"))["tokens"])
    tokenizer: Any = AutoTokenizer.from_pretrained(models[family])
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a red cat"}], add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )["input_ids"]  # fmt: skip
    plain = upstream(models[family])
    base = _greedy(plain, asked, tokenizer.eos_token_id)
    model: Any = PeftModel.from_pretrained(plain, folder)
    adapted = _greedy(model, asked, tokenizer.eos_token_id)
    assert written == [adapted, base]
    assert adapted != base
    matched = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["task_type"] == "CAUSAL_LM"
    assert len(matched) == len([one for one in _keys(folder) if "lora_A" in one])


def _keys(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


def _greedy(model: Any, ids: Tensor, eos: int) -> list[int]:
    """Without a cache, so that ours is held to something simpler."""
    found: list[int] = []
    while len(found) < 12:
        with torch.no_grad():
            token = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        if token == eos:
            break
        found.append(token)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return found


def test_a_seed_fixes_a_text_and_a_placement_does_not_change_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Two seeds differ; the same seed from streamed blocks gives the same words."""
    written: dict[str, list[str]] = {}
    for kind in ("resident", "stream"):
        recipe = recipe_of(
            models,
            tmp_path,
            placement={"kind": kind, "slots": 2},
            compare={"temperature": 1.5, "max_tokens": 12},
            train={"steps": 2},
        )
        if kind == "resident":
            train_here(recipe)
        told = outsize(
            "sample", recipe, "-p", "a red cat", "--seed", "1", "--seed", "2", "--offline"
        )
        assert told.returncode == 0, told.stderr
        files = sorted((tmp_path / "runs" / "run" / "samples").glob("*.txt"))[-2:]
        written[kind] = [one.read_text(encoding="utf-8") for one in files]
    assert written["resident"] == written["stream"]
    assert written["resident"][0] != written["resident"][1]


def test_compare_puts_base_and_adapter_side_by_side(trained: dict[str, Path]) -> None:
    """Prompts and controls, and beginnings of held-out texts where a recipe names none."""
    recipe = trained["llama"]
    told = outsize("compare", recipe, "--offline")
    assert told.returncode == 0, told.stderr
    assert re.search(r"prompt +base +adapter", told.stdout)
    folder = recipe.parent / "runs" / "run" / "compare" / "001"
    rows = json.loads((folder / "compare.json").read_text(encoding="utf-8"))["texts"]
    assert [row["prompt"] for row in rows] == ["a red cat", "the dog"]
    assert all(row["base"] != row["adapter"] for row in rows)
    page = (folder / "compare.md").read_text(encoding="utf-8")
    assert "## Controls" in page
    text = (
        recipe.read_text(encoding="utf-8")
        .replace("- a red cat", "")
        .replace("prompts:", "prompts: []")
    )
    recipe.with_name("other.yaml").write_text(text, encoding="utf-8")
    told = outsize("compare", recipe.with_name("other.yaml"), "--offline")
    assert told.returncode == 0, told.stderr
    rows = json.loads((folder.parent / "002" / "compare.json").read_text(encoding="utf-8"))["texts"]
    assert rows[0]["prompt"].endswith("<|im_start|>assistant\n")


def test_a_run_writes_without_the_texts_that_it_learned_from(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter is what was wanted of them; what is taken for granted instead is said, and comes to the same words."""
    recipe = trained["mistral3"]
    talks, said = recipe.parent / "talks.jsonl", []
    samples = recipe.parent / "runs" / "run" / "samples"
    for is_there in (True, False):
        if not is_there:
            talks.rename(tmp_path / "talks.jsonl")
        told = outsize("sample", recipe, "-p", "the dog", "--offline")
        assert told.returncode == 0, told.stderr
        assert ("is not there: prompts are worded by the chat template" in told.stderr) != is_there
        said.append(max(samples.glob("*.txt")).read_text(encoding="utf-8"))
    assert said[0] == said[1]
    text = recipe.read_text(encoding="utf-8").replace("- a red cat", "")
    recipe.with_name("other.yaml").write_text(
        text.replace("prompts:", "prompts: []"), encoding="utf-8"
    )
    told = outsize("compare", recipe.with_name("other.yaml"), "--offline")
    (tmp_path / "talks.jsonl").rename(talks)
    assert told.returncode == 2
    assert "name compare.prompts" in told.stderr
