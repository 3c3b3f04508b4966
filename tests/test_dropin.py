"""A plug-in is one file added and none edited: proved by adding five to a copy of the package and running the command.

The files lie in tests/dropin: a format, a base family, a language family, a placement and a dialect that this project does
not have. A copy of the package gets them, each in its folder, and nothing else; then the real command runs from that copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_support import checkpoint_bytes, environment, write_pictures
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from text_run_support import write_talks
from tiny import random_tensors, write_tiny_component
from tiny_tokenizers import write_qwen

import outsize
from outsize.base.journal import read_journal
from outsize.runs.folder import RunFolder

DROPIN = Path(__file__).parent / "dropin"
PLACES = {
    "absmax8": "formats",
    "pebble": "families",
    "verse": "families",
    "borrowed": "placement",
    "updown": "dialects",
}
# runs several command lines in one process, since importing torch and PEFT takes longer than all of them together
SEVERAL = """
import json, sys
from outsize.cli.main import main
for line in json.loads(sys.argv[1]):
    print("CODE", main(line), *line, flush=True)
"""


@dataclass(frozen=True)
class Site:
    """A copy of the package with the new files, and a recipe's surroundings."""

    folder: Path

    @property
    def source(self) -> Path:
        """Where the copy lies."""
        return self.folder / "source"

    def recipe(self, name: str, *, steps: int = 4, **placement: Any) -> Path:
        """A recipe for the new family in the new format."""
        values = {
            "name": name,
            "base": {"family": "pebble", "variant": "tiny", "source": "model", "format": "absmax8"},
            "data": {"resolution": 32, "caption_dropout": 0.2, "sets": [{"folder": "pictures"}]},
            "adapter": {"rank": 4, "alpha": 6.0},
            "train": {"steps": steps, "learning_rate": 0.01, "accumulate": 2},
            "placement": placement,
            "checkpoints": {"every": 100},
            "compare": {"prompts": ["a red picture"], "controls": ["a blue picture"]},
            "cache": "cache",
        }
        path = self.folder / f"{name}-{steps}.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def run(
        self, *arguments: str | Path, code: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The command, or a program, with the copy in place of the package."""
        start = ["-m", "outsize"] if code is None else ["-c", code]
        return subprocess.run(
            [sys.executable, *start, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environment() | {"PYTHONPATH": str(self.source)},
        )

    def several(self, *lines: tuple[str | Path, ...]) -> tuple[list[int], str]:
        """Several commands in one process: their exit codes, and all they said."""
        done = self.run(json.dumps([list(map(str, line)) for line in lines]), code=SEVERAL)
        said = done.stdout + done.stderr
        codes = [int(line.split()[1]) for line in said.splitlines() if line.startswith("CODE")]
        assert len(codes) == len(lines), said
        return codes, said

    def state(self, name: str) -> RunFolder:
        """A run's folder."""
        return RunFolder(self.folder / "runs" / name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("dropin"))
    skipped = shutil.ignore_patterns("__pycache__", "teaching")
    shutil.copytree(Path(outsize.__file__).parent, made.source / "outsize", ignore=skipped)
    for name, place in PLACES.items():
        shutil.copy(DROPIN / f"{name}.py", made.source / "outsize" / place)
    write_pictures(made.folder / "pictures", 4, size=(32, 32))
    model = made.folder / "model"
    (model / "transformer").mkdir(parents=True)
    weights = random_tensors(_table(), seed=5)
    save_file(
        {f"model.{name}": one.bfloat16() for name, one in weights.items()},
        model / "transformer" / "weights.safetensors",
    )
    write_tiny_component("t5_text", "tiny", model, slot="text_encoder", tokenizer="tokenizer")
    write_tiny_component("autoencoder_kl", "tiny", model, slot="vae")
    return made


def _table() -> Any:
    """The new family's table, from the file itself: this process does not have the family."""
    return _module("pebble").TABLE


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DROPIN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digests(package: Path) -> dict[str, str]:
    return {
        one.relative_to(package).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in package.rglob("*.py")
        if "teaching" not in one.parts
    }


def test_five_files_are_added_and_none_is_edited(site: Site) -> None:
    """What the copy has over the original is the five plug-ins: no list, no registry, no import."""
    original, copy = _digests(Path(outsize.__file__).parent), _digests(site.source / "outsize")
    added = {f"{place}/{name}.py" for name, place in PLACES.items()}
    assert copy.keys() - original.keys() == added
    assert {name: copy[name] for name in original} == original


def test_the_new_names_are_known_and_planned_without_torch(site: Site) -> None:
    recipe = site.recipe("planned", kind="stream", slots=2)
    code = (
        "import sys, json; from outsize.cli.main import main; "
        "codes = [main(line) for line in json.loads(sys.argv[1])]; "
        "assert 'torch' not in sys.modules; print(codes)"
    )
    lines = [["recipe", "--new", "pebble.tiny"], ["recipe", str(recipe)], ["plan", str(recipe)]]
    done = site.run(json.dumps(lines), code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0]", done.stdout
    assert "family: pebble" in done.stdout
    assert "pebble.tiny on" in done.stdout
    near = site.recipe("near", kind="borowed")
    refused = site.run("plan", near)
    assert refused.returncode == 2
    assert "borrowed" in refused.stderr


@pytest.fixture(scope="module")
def said(site: Site) -> str:
    """Everything that is done with the new plug-ins, in two processes; what the second one said."""
    stop = site.state("streamed").stop_now
    stop.parent.mkdir(parents=True)
    stop.touch()
    streamed = site.recipe("streamed", kind="stream", slots=2)
    codes, text = site.several(
        ("prepare", streamed, "--device", "cpu"), ("train", streamed, "--device", "cpu")
    )
    assert codes == [0, 3], text
    assert "stopped after step 1 of 4" in text
    peft, own = site.folder / "peft", site.folder / "own.safetensors"
    codes, text = site.several(
        ("train", streamed, "--device", "cpu"),
        ("train", site.recipe("resident", kind="resident"), "--device", "cpu"),
        ("train", site.recipe("borrowed", kind="borrowed"), "--device", "cpu"),
        ("compare", streamed, "--device", "cpu"),
        ("export", streamed, "--to", "peft", "--out", peft),
        ("export", streamed, "--to", "updown", "--out", own),
        ("export", streamed, "--to", "diffusion_model", "--out", site.folder / "no.safetensors"),
    )
    # the last one needs names of an original checkpoint, which this family does not have
    assert codes == [0, 0, 0, 0, 0, 0, 9], text
    return text


def test_a_stopped_and_resumed_streamed_run_equals_unbroken_ones_in_other_placements(
    site: Site, said: str
) -> None:
    assert "resuming after step 1" in said
    expected = checkpoint_bytes(site.state("resident"))
    assert checkpoint_bytes(site.state("streamed")) == expected
    assert checkpoint_bytes(site.state("borrowed")) == expected
    for name in ("streamed", "resident", "borrowed"):
        assert site.state(name).state == "completed"


def test_the_new_format_holds_every_linear_of_base_and_text_encoder(site: Site, said: str) -> None:
    assert "completed after step 4 of 4" in said
    (base,) = (site.folder / "cache").glob("pebble-tiny-base-*")
    blocks = [load_file(one) for one in sorted(base.glob("*.safetensors"))]
    codes = {name for tensors in blocks for name in tensors if name.endswith(".codes")}
    assert codes == {f"{spec.name}.codes" for spec in _table().linears()}
    (text,) = (site.folder / "cache").glob("t5_text-tiny-text_encoder-*")
    assert any(
        name.endswith(".codes") for one in text.glob("*.safetensors") for name in load_file(one)
    )


def test_the_comparison_and_the_exports_are_those_of_the_new_family(site: Site, said: str) -> None:
    modules = {spec.module for spec in _table().linears()}
    assert f"adapter: {len(modules)} modules" in said
    folder = site.state("streamed").path / "compare" / "001"
    assert (folder / "grid.png").exists()
    assert len(list(folder.glob("*-adapter.png"))) == 2
    events = [one["event"] for one in read_journal(site.state("streamed").journal)]
    assert events.count("device") == 4
    assert "compared" in events

    config = json.loads((site.folder / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    peft = load_file(site.folder / "peft" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").split(".lora_")[0] for name in peft} == modules
    own = load_file(site.folder / "own.safetensors")
    trained = load_file(site.state("streamed").checkpoints / "00000004" / "adapter.safetensors")
    for module in modules:
        assert own[f"{module}.down"].equal(trained[f"{module}.lora_A"])
        assert own[f"{module}.up"].equal(trained[f"{module}.lora_B"])
        assert bool(own[f"{module}.up"].any())
    with safe_open(site.folder / "own.safetensors", "pt") as file:
        assert file.metadata()["outsize.base"] == "pebble.tiny"
    assert "no layout of an original checkpoint" in said
    assert not (site.folder / "no.safetensors").exists()


def test_a_new_language_family_trains_writes_and_is_exported_in_the_new_format_and_placement(
    site: Site,
) -> None:
    """What is learned from follows from the family's objective: no file had to hear of it."""
    module, folder = _module("verse"), site.folder / "verse"
    torch.manual_seed(5)
    model = module.make(module.plugin.config("tiny")).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_qwen(folder)
    write_talks(site.folder / "talks.jsonl")
    recipe = site.recipe("verse", kind="borrowed")
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["base"] |= {"family": "verse", "source": "verse"}
    values["data"] = {"sets": [{"path": "talks.jsonl"}], "window": 64}
    values["compare"] = {"prompts": ["a red cat"], "max_tokens": 4}
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    codes, text = site.several(
        ("recipe", "--new", "verse.tiny"),
        ("plan", recipe),
        ("train", recipe, "--device", "cpu"),
        ("sample", recipe, "-p", "the dog", "--device", "cpu"),
        ("compare", recipe, "--device", "cpu"),
        ("export", recipe, "--out", site.folder / "verse-adapter"),
    )
    assert codes == [0] * 6, text
    assert "verse.tiny on" in text
    assert "Held-out text" in text
    modules = {spec.module for spec in module.plugin.table("tiny").linears()}
    keys = load_file(site.folder / "verse-adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").split(".lora_")[0] for name in keys} == modules
    assert "modules are named as in Qwen3ForCausalLM" in text
