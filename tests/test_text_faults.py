"""What goes wrong with texts, tokenizers and checkpoints of language bases: one clear sentence, nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_support import outsize, write_recipe
from text_run_support import write_language, write_talks, write_text_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language(tmp_path_factory.mktemp("model") / "llama")


def talk(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]})


GOOD = talk(("user", "hi"), ("assistant", "a cat"))
LONG = talk(("user", "hi"), ("assistant", "a cat " * 200))
SPEAKER = talk(("user", "hi"), ("narrator", "he said"), ("assistant", "a cat"))


@pytest.mark.parametrize(
    ("lines", "data", "said"),
    [
        (
            [GOOD, SPEAKER],
            {},
            "line 2: the chat template does not know the role 'narrator' of message 2",
        ),
        (
            [GOOD, talk(("user", "hi"), ("assistant", " "))],
            {},
            "line 2: message 2 is an assistant turn without words",
        ),
        ([GOOD, GOOD, '{"messages": ['], {}, "talks.jsonl: line 3: "),
        ([GOOD] * 8 + [LONG], {"long_samples": "refuse"}, "line 9"),
        (
            [talk(("user", "word " * 200), ("assistant", "a cat"))] * 8,
            {},
            "so nothing would be learned",
        ),
        ([GOOD, '{"question": "why"}'], {}, "line 2: has no column 'messages'"),
        (["[1, 2]"], {}, "line 1: must be an object with columns, and is a list"),
    ],
    ids=["role", "empty turn", "no json", "too long", "masked", "columns", "list"],
)
def test_faults_of_texts_are_named_with_file_and_line(
    model: Path, tmp_path: Path, lines: list[str], data: dict[str, Any], said: str
) -> None:
    """Before any weight is read."""
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe = write_text_recipe(tmp_path, model=model, data=data)
    told = outsize("train", recipe, "--offline")
    assert told.returncode == 5, told.stdout + told.stderr
    assert said in told.stderr
    assert "Traceback" not in told.stderr
    assert not list((tmp_path / "cache").glob("llama-*"))


def test_the_preview_shows_what_training_refuses_and_corrected_texts_are_trained(
    model: Path, tmp_path: Path
) -> None:
    """Samples first, so that a person sees why; a run that was refused is no obstacle afterwards."""
    silent = talk(("user", "word " * 200), ("assistant", "a cat"))
    (tmp_path / "talks.jsonl").write_text(f"{silent}\n" * 8, encoding="utf-8")
    recipe = write_text_recipe(tmp_path, model=model)
    assert outsize("train", recipe, "--offline").returncode == 5
    told = outsize("data", "preview", recipe, "--offline", "-n", "1")
    assert told.returncode == 5
    assert "so nothing would be learned" in told.stderr
    assert "{+a cat<|im_end|>+}" in told.stdout
    write_talks(tmp_path / "talks.jsonl")
    told = outsize("data", "preview", recipe, "--offline", "-n", "1")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("{+") == 1
    assert "talks.jsonl       24     885    24.4%" in told.stdout
    assert outsize("train", recipe, "--offline").returncode == 0, "nothing was lost"


def test_a_tokenizer_without_a_chat_template_is_refused(model: Path, tmp_path: Path) -> None:
    """Where there are conversations; plain texts need none."""
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    told = outsize("train", write_text_recipe(tmp_path, model=bare), "--offline")
    assert told.returncode == 5
    assert "has no chat template" in told.stderr
    (tmp_path / "plain.txt").write_text("\n\n".join(["a red cat and a dog"] * 9), encoding="utf-8")
    data = {"sets": [{"path": "plain.txt"}], "window": 8}
    told = outsize("train", write_text_recipe(tmp_path, model=bare, data=data), "--offline")
    assert told.returncode == 0, told.stderr


def test_a_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    """Its tokens would be looked up beyond the table."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    file = other / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    for one in values["added_tokens"]:
        one["id"] += 1000 if one["content"] == "<|im_end|>" else 0
    vocab = values["model"]["vocab"]
    vocab["<|im_end|>"] = vocab["<|im_end|>"] + 1000
    file.write_text(json.dumps(values), encoding="utf-8")
    (other / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    told = outsize("train", write_text_recipe(tmp_path, model=other), "--offline")
    assert told.returncode == 5
    assert "llama.tiny has 640 of them: it belongs to another model" in told.stderr


def test_a_checkpoint_of_another_family_and_a_missing_shard_are_named(
    model: Path, tmp_path: Path
) -> None:
    """Before anything is written."""
    recipe = write_text_recipe(tmp_path, model=write_language(tmp_path / "gemma", "gemma4"))
    told = outsize("train", recipe, "--offline")
    assert told.returncode == 5
    assert "Traceback" not in told.stderr
    assert not list((tmp_path / "cache").glob("llama-*"))
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    (broken / "model.safetensors").rename(broken / "model-00001-of-00002.safetensors")
    from safetensors import safe_open

    with safe_open(broken / "model-00001-of-00002.safetensors", "pt") as file:
        names = dict.fromkeys(file.keys(), "model-00001-of-00002.safetensors")
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": names}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    told = outsize("train", write_text_recipe(tmp_path, model=broken), "--offline")
    assert told.returncode == 5
    assert "model-00002-of-00002.safetensors" in told.stderr


def write_with(recipe: Path, data: dict[str, Any]) -> None:
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    recipe.write_text(yaml.safe_dump({**values, "data": data}), encoding="utf-8")


def test_data_of_the_other_kind_is_refused_in_both_directions(model: Path, tmp_path: Path) -> None:
    """With the keys that the base wants; and settings that only the other kind reads."""
    recipe = write_recipe(tmp_path / "a", model=tmp_path)
    write_with(recipe, {"sets": [{"path": "a.jsonl"}]})
    told = outsize("train", recipe)
    assert told.returncode == 2
    assert "data: flux2 learns from pictures, so data has the keys resolution" in told.stderr
    assert "found those of text" in told.stderr
    recipe = write_text_recipe(
        tmp_path / "b", model=model, compare={"width": 64}, train={"guidance": 1.0}
    )
    write_with(recipe, {"sets": [{"folder": "a"}]})
    told = outsize("plan", recipe)
    assert told.returncode == 2
    assert "llama learns from text, so data has the keys sets, window" in told.stderr
    assert "compare.width: has no meaning for a base that learns from text" in told.stderr
    assert "train.guidance: has no meaning" in told.stderr


def test_files_that_are_not_there_are_named_at_once(model: Path, tmp_path: Path) -> None:
    """All of them, before the device is opened."""
    data = {"sets": [{"path": "one.jsonl"}, {"path": "two"}]}
    told = outsize("train", write_text_recipe(tmp_path, model=model, data=data), "--offline")
    assert told.returncode == 5
    assert "one.jsonl" in told.stderr
    assert str(tmp_path / "two") in told.stderr
