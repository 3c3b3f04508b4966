"""The command as a newcomer meets it: help without torch, mistakes with a remedy and a code, a run told to its end.

Everything runs in child processes. Those that import torch take most of the time, so that what needs it shares two.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_support import command, environment, outsize, write_recipe
from tiny import write_tiny

from outsize.base import errors
from outsize.base.journal import read_journal
from outsize.cli.main import build_app
from outsize.runs.folder import RunFolder

# runs command lines in one process; says after each what it returned and whether torch had been imported by then
SEVERAL = """
import json, sys
from outsize.cli.main import main
for line in json.loads(sys.argv[1]):
    code = main(line)
    sys.stdout.flush()
    print("CODE", code, "torch" in sys.modules, file=sys.stderr, flush=True)
"""
COMMANDS = sorted(one.name for one in build_app().registered_commands if one.name)


class Said:
    """What one command line said and returned."""

    def __init__(self, code: int, text: str, *, has_torch: bool) -> None:
        self.code, self.text, self.has_torch = code, text, has_torch


def several(*lines: list[str | Path]) -> list[Said]:
    """Run command lines one after the other in one process."""
    done = subprocess.run(
        [command()[0], "-c", SEVERAL, json.dumps([list(map(str, line)) for line in lines])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment(),
    )
    *texts, rest = re.split(r"^CODE (\d+) (True|False)\n", done.stdout, flags=re.MULTILINE)
    assert len(texts) == 3 * len(lines), done.stdout
    assert rest == "", rest
    return [
        Said(int(code), text, has_torch=torch == "True")
        for text, code, torch in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model"))


def test_every_command_helps_and_nothing_heavy_is_imported() -> None:
    assert {"plan", "prepare", "train", "compare", "export", "recipe"} <= set(COMMANDS)
    code = (
        SEVERAL
        + "\nheavy = {'torch', 'diffusers', 'transformers', 'peft', 'numpy'} & set(sys.modules)\nprint(sorted(heavy))"
    )
    lines = [["--help"], *([name, "--help"] for name in COMMANDS)]
    done = subprocess.run(
        [command()[0], "-c", code, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.stderr.count("CODE 0 False\n") == len(lines), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert f"outsize {name}" in done.stdout


def test_help_lists_the_exit_code_of_every_error() -> None:
    text = outsize("--help").stdout
    classes = errors.OutsizeError.__subclasses__()
    assert len({one.exit_code for one in classes}) == len(classes) >= 8
    for one in classes:
        assert re.search(rf"^\s+{one.exit_code}  \S", text, re.MULTILINE), one


# Mistakes. Each row: what is done to a good recipe, the command, its code, and what it must say.


def _same(recipe: Path) -> Path:
    return recipe


def _missing(recipe: Path) -> Path:
    return recipe.with_name("nowhere.yaml")


def _folder(recipe: Path) -> Path:
    return recipe.parent


def _torn(recipe: Path) -> Path:
    recipe.write_text("name: run\nbase: [flux2, tiny\n", encoding="utf-8")
    return recipe


def _changed(section: str, **values: Any) -> Callable[[Path], Path]:
    def change(recipe: Path) -> Path:
        whole = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        whole[section] = whole.get(section, {}) | values
        recipe.write_text(yaml.safe_dump(whole), encoding="utf-8")
        return recipe

    return change


def _without_pictures(recipe: Path) -> Path:
    shutil.rmtree(recipe.parent / "pictures")
    return recipe


def _source_without(*names: str) -> Callable[[Path], Path]:
    """The recipe with a copy of the model in which the base lacks some tensors."""

    def change(recipe: Path) -> Path:
        from safetensors.torch import load_file, save_file

        whole = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        copy = recipe.parent / "torn"
        shutil.copytree(whole["base"]["source"], copy)
        (file,) = (copy / "transformer").glob("*.safetensors")
        tensors = {name: one for name, one in load_file(file).items() if name not in names}
        save_file(tensors, file)
        return _changed("base", source=str(copy))(recipe)

    return change


MISSING = ("proj_out.weight", "transformer_blocks.1.attn.to_q.weight")
MISTAKES: dict[str, tuple[Callable[[Path], Path], list[str], int, list[str]]] = {
    "no such recipe": (_missing, ["train"], 2, ["nowhere.yaml", "no such file", "recipe --new"]),
    "a folder that is no run": (_folder, ["train"], 2, ["no run folder", "name a recipe file"]),
    "a folder to plan": (_folder, ["plan"], 2, ["it is a folder", "name the YAML file"]),
    "torn YAML": (_torn, ["plan"], 2, ["recipe.yaml: line 3", "not readable as YAML"]),
    "a misspelt key": (
        _changed("train", stepps=3),
        ["train"],
        2,
        ["recipe.yaml: line", "train.stepps", "did you mean 'steps'"],
    ),
    "an unknown family": (
        _changed("base", family="fluxx2"),
        ["train"],
        2,
        ["no family is called 'fluxx2'", "did you mean 'flux2'"],
    ),
    "an unknown variant": (
        _changed("base", variant="tinny"),
        ["plan"],
        2,
        ["no variant 'tinny'", "tiny"],
    ),
    "an unknown placement": (
        _changed("placement", kind="streem"),
        ["plan"],
        2,
        ["no placement is called 'streem'", "stream"],
    ),
    "no pictures": (
        _without_pictures,
        ["train"],
        5,
        ["no such folder of pictures", "pictures", "data.sets"],
    ),
    "no source": (
        _changed("base", source="./not-there"),
        ["prepare"],
        5,
        ["not-there"],
    ),
    "a source that lacks tensors": (_source_without(*MISSING), ["prepare"], 5, list(MISSING)),
    "more than the machine": (
        _changed("base", variant="dev"),
        ["plan", "--vram", "2GiB", "--ram", "4GiB"],
        4,
        ["DoesNotFit", "needs", "GiB"],
    ),
    "compare without a checkpoint": (_same, ["compare"], 2, ["has no checkpoint", "train first"]),
    "sample without a checkpoint": (
        _same,
        ["sample", "--prompt", "x"],
        2,
        ["has no checkpoint", "train first"],
    ),
    "export without a checkpoint": (_same, ["export"], 2, ["has no checkpoint", "train first"]),
    "an option that is none": (_same, ["train", "--stepps", "3"], 2, ["No such option"]),
    "an unknown command": (_same, ["trian"], 2, ["No such command"]),
}


def test_mistakes_are_told_with_their_remedy_and_code_before_torch_is_imported(
    model: Path, tmp_path: Path
) -> None:
    """One process for all of them, so that the first to import torch would be found out."""
    lines: list[list[str | Path]] = []
    for number, (change, line, _code, _words) in enumerate(MISTAKES.values()):
        recipe = change(write_recipe(tmp_path / str(number), model=model))
        lines.append([line[0], recipe, *line[1:]])
    for name, said in zip(MISTAKES, several(*lines), strict=True):
        _, line, code, words = MISTAKES[name]
        assert said.code == code, f"{name}: {said.text}"
        assert "Traceback" not in said.text, f"{name}: {said.text}"
        assert not said.has_torch, f"{name} ({line[0]}) imported torch"
        for word in words:
            assert word in said.text, f"{name} does not say {word!r}: {said.text}"
    assert not list(tmp_path.glob("*/runs")), "a refused command leaves no run folder"


def test_train_is_refused_by_the_plan_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    """RAM for 1024 pictures of 8192 pixels squared at once is on no machine."""
    recipe = write_recipe(tmp_path, model=model, data={"resolution": 8192}, train={"batch": 1024})
    (said,) = several(["train", recipe, "--device", "cpu"])
    assert said.code == 4, said.text
    assert not said.has_torch
    assert "Smallest change" in said.text or "No change of this recipe fits" in said.text
    assert "1024" in said.text
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Said]]:
    """A newcomer's whole way in one process, and the way of one with a broken picture."""
    folder = tmp_path_factory.mktemp("way")
    recipe = write_recipe(folder, model=model, train={"steps": 3})
    broken = write_recipe(folder / "broken", model=model, cache=str(folder / "cache"))
    (folder / "broken" / "pictures" / "03.png").write_bytes(b"no picture")
    run = folder / "runs" / "run"
    return folder, several(
        ["prepare", recipe, "--device", "cpu"],
        ["train", recipe, "--device", "cpu"],
        ["export", recipe, "--to", "peft"],
        ["export", run, "--to", "peft"],
        ["export", run],
        ["export", run],
        ["export", run, "--to", "pefft"],
        ["train", broken, "--device", "cpu"],
        ["train", run, "--device", "cpu"],
    )


def test_prepare_says_what_it_made(told: tuple[Path, list[Said]]) -> None:
    said = told[1][0]
    assert said.code == 0
    for slot in ("base", "text_encoder", "vae"):
        assert re.search(rf"^{slot}: prepared, [\d.]+ KiB in ", said.text, re.MULTILINE)


def test_a_second_prepare_finds_everything_there_and_imports_no_torch(
    told: tuple[Path, list[Said]],
) -> None:
    recipe = told[0] / "recipe.yaml"
    began = time.monotonic()
    (said,) = several(["prepare", recipe, "--device", "cpu"])
    seconds = time.monotonic() - began
    assert said.code == 0
    assert not said.has_torch
    assert said.text.count("there already") == 3
    assert seconds < 10, "0.9 s on an idle machine; this one may be busy"


def test_train_tells_the_adapter_the_stages_and_the_plan_against_what_was_measured(
    told: tuple[Path, list[Said]],
) -> None:
    folder, (_, said, *_) = told
    assert said.code == 0
    assert re.search(r"^plan: resident, .* at most; ", said.text, re.MULTILINE)
    assert re.search(r"^adapter: 28 modules, [\d,]+ parameters, rank 4$", said.text, re.MULTILINE)
    assert re.search(r"^step 1: loss [\d.]+, gradient ", said.text, re.MULTILINE)
    assert "delta's norm is" in said.text
    stages = said.text.split("Where time and memory went")[1].split("Plan against measured")[0]
    for stage in ("cache text_encoder", "cache latents", "load base", "train", "all, and the"):
        assert re.search(rf"^{stage}.* s .*iB$", stages, re.MULTILINE), f"{stage} in {stages}"
    compared = said.text.split("Plan against measured")[1]
    assert re.search(r"^train .*iB +[\d.]+ .iB +[+-]\d+%", compared, re.MULTILINE), compared
    run = folder / "runs" / "run"
    assert said.text.rstrip().endswith(
        f"completed after step 3 of 3: {run}\nreport: {run / 'report.html'}"
    )


def test_the_journal_holds_the_run_in_order(told: tuple[Path, list[Said]]) -> None:
    run = RunFolder(told[0] / "runs" / "run")
    events = list(read_journal(run.journal))
    names = [one["event"] for one in events]
    for name in ("device", "stage", "adapter", "step", "checkpoint", "delta", "completed"):
        assert name in names, name
    steps = [one for one in events if one["event"] == "step"]
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert all(one["loss"] > 0 and one["seconds"] > 0 for one in steps)
    kept = [one["step"] for one in events if one["event"] == "checkpoint"]
    assert kept == [2, 3]
    order = [names.index(name) for name in ("adapter", "step", "delta", "completed")]
    assert order == sorted(order)
    (adapter,) = {one["modules"] for one in events if one["event"] == "adapter"}
    assert adapter == 28


def test_the_way_to_the_first_step_is_told_and_adds_up(told: tuple[Path, list[Said]]) -> None:
    folder, (_, said, *_) = told
    (boot,) = [
        one
        for one in read_journal(RunFolder(folder / "runs" / "run").journal)
        if one["event"] == "boot"
    ]
    names = [leg["name"] for leg in boot["legs"]]
    expected = ["Python started", "command read", "planned", "torch imported", "device opened"]
    assert names[:5] == expected
    assert names[-5:] == [
        "store verified", "base built", "base loaded", "adapter attached", "first step done",
    ]  # fmt: skip
    passed = [leg["seconds"] for leg in boot["legs"]]
    assert min(passed) >= 0
    # each is rounded to a thousandth
    assert sum(passed) == pytest.approx(boot["seconds"], abs=0.001 * len(passed))
    table = said.text.split("Boot: from process start")[1].split("Where time and memory went")[0]
    for name in names:
        assert re.search(rf"^{name} .* s .*%$", table, re.MULTILINE), f"{name} in {table}"
    assert "can be repeated bit for bit" in said.text


def test_a_folder_is_exported_once_and_a_file_again(told: tuple[Path, list[Said]]) -> None:
    """What somebody may have changed in a folder is not overwritten; a file is replaced whole."""
    folder, said = told
    first, second, file, again, unknown = said[2:7]
    assert first.code == 0
    assert re.search(r"^28 modules, .* difference after reading back 0: ", first.text)
    assert second.code == 9
    assert "already there" in second.text
    assert (file.code, again.code) == (0, 0)
    exported = folder / "runs" / "run" / "export"
    assert sorted(one.name for one in exported.iterdir()) == [
        "run-diffusion_model.safetensors",
        "run-peft",
    ]
    assert unknown.code == 2
    assert "did you mean 'peft'" in unknown.text


def test_a_broken_picture_is_named_before_anything_is_loaded(
    told: tuple[Path, list[Said]],
) -> None:
    folder, said = told
    broken = said[7]
    assert broken.code == 5
    assert str(folder / "broken" / "pictures" / "03.png") in broken.text
    assert "not a readable picture" in broken.text
    assert "object at 0x" not in broken.text
    events = [
        one["event"] for one in read_journal(folder / "broken" / "runs" / "run" / "journal.jsonl")
    ]
    assert events == ["device", "people", "failed"]


def test_a_finished_run_named_by_its_folder_has_nothing_left_to_do(
    told: tuple[Path, list[Said]],
) -> None:
    said = told[1][8]
    assert said.code == 0, said.text
    assert "resuming after step 3" in said.text
    assert "completed after step 3 of 3" in said.text
    assert not any("Traceback" in one.text for one in told[1])
