"""Provenance: where data come from, stated beside them, bound to their content, and carried by what is trained on them."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from data_support import write_picture
from run_support import (
    checkpoint_bytes,
    outsize,
    train_here,
    write_pictures,
    write_recipe,
)
from safetensors import safe_open
from text_run_support import write_language, write_talks, write_text_recipe
from tiny import write_tiny

from outsize.app.export import export_run
from outsize.app.provenance import stated_of
from outsize.base.errors import RecipeError, SourceError
from outsize.data.statements import faults_in, read_statements
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder

ANNA, BERT = "s-00000000000a", "s-00000000000b"
ALL = (
    "--source", "https://example.org/set", "--licence", "CC-BY-4.0", "--basis", "licence",
    "--subject", "none", "--retrieved", "2026-11-30", "--transform", "none",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three captioned pictures."""
    write_pictures(tmp_path / "pictures", 3, size=(48, 48))
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model") / "flux2")


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The file as it lies there, read by nothing of ours."""
    text = (folder / "provenance.jsonl").read_text(encoding="utf-8")
    return {one["file"]: one for one in map(json.loads, text.splitlines())}


def manifest(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return outsize("data", "manifest", *arguments)


def told(*arguments: str | Path) -> dict[str, Any]:
    done = manifest(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_folder_gets_a_line_for_each_picture_and_is_told_what_is_missing(folder: Path) -> None:
    """Nobody fills in what they are not asked for; captions are no data of their own."""
    pictures = folder / "pictures"
    done = manifest(pictures)
    assert done.returncode == 0, done.stderr
    lines = lines_of(pictures)
    assert set(lines) == {"00.png", "01.png", "02.png"}
    content = (pictures / "01.png").read_bytes()
    assert lines["01.png"] == {
        "file": "01.png", "sha256": hashlib.sha256(content).hexdigest(), "source": None, "licence": None,
        "basis": None, "subjects": None, "retrieved": None, "transforms": None,
    }  # fmt: skip
    assert "lacks source, licence, basis, subjects, retrieved, transforms" in done.stdout
    before = (pictures / "provenance.jsonl").stat().st_mtime_ns
    checked = manifest(pictures, "--check")
    assert checked.returncode == SourceError.exit_code
    assert "3 of 3 files lack something or were edited since" in checked.stderr
    assert (pictures / "provenance.jsonl").stat().st_mtime_ns == before


def test_options_fill_in_what_is_not_stated_for_all_or_for_a_glob(folder: Path) -> None:
    """What a person stated of one picture is not lost when the rest is stated of all."""
    pictures = folder / "pictures"
    one = ("--basis", "consent", "--subject", ANNA, "--subject", BERT, "--source", "camera")
    assert told(pictures, "--for", "00.*", *one)["missing"]["basis"] == 2
    assert told(pictures, *ALL)["missing"] == {}
    lines = lines_of(pictures)
    assert lines["00.png"]["subjects"] == [ANNA, BERT]
    assert lines["00.png"]["source"] == "camera"
    assert lines["01.png"]["source"] == "https://example.org/set"
    assert (lines["01.png"]["subjects"], lines["01.png"]["transforms"]) == ([], [])
    assert manifest(pictures, "--check").returncode == 0
    told(pictures, "--source", "elsewhere", "--replace", "--for", "01.png")
    assert [one["source"] for one in lines_of(pictures).values()] == [
        "camera", "elsewhere", "https://example.org/set",
    ]  # fmt: skip


def test_new_renamed_vanished_and_returned_files_are_told_apart(folder: Path) -> None:
    """A name is no identity: what was stated follows the content."""
    pictures = folder / "pictures"
    told(pictures, *ALL)
    (pictures / "00.png").rename(pictures / "deep.png")
    gone = (pictures / "01.png").read_bytes()
    (pictures / "01.png").unlink()
    write_picture(pictures / "03.png", (40, 40), seed=9)
    facts = told(pictures)
    assert facts["vanished"] == [str(pictures / "01.png")]
    assert [Path(one["file"]).name for one in facts["faults"]] == ["03.png"]
    lines = lines_of(pictures)
    assert set(lines) == {"deep.png", "01.png", "02.png", "03.png"}
    assert lines["deep.png"]["source"] == "https://example.org/set"
    assert lines["01.png"]["vanished"] is True
    (pictures / "01.png").write_bytes(gone)
    assert told(pictures)["vanished"] == []
    assert "vanished" not in lines_of(pictures)["01.png"]


def test_an_edited_picture_fails_the_check_and_is_only_taken_when_told_to(folder: Path) -> None:
    """What was stated of one picture must not come to stand for another."""
    pictures = folder / "pictures"
    told(pictures, *ALL)
    before = lines_of(pictures)["02.png"]
    write_picture(pictures / "02.png", (48, 48), seed=99)
    assert told(pictures)["faults"] == [
        {"file": str(pictures / "02.png"), "fault": "was edited since"}
    ]
    assert lines_of(pictures)["02.png"] == before
    checked = manifest(pictures, "--check")
    assert checked.returncode == SourceError.exit_code
    assert "02.png was edited since" in checked.stderr
    facts = told(pictures, "--accept-edits")
    assert facts["missing"] == {"transforms": 1}
    told(pictures, "--transform", "painted over")
    assert manifest(pictures, "--check").returncode == 0


def test_what_cannot_be_meant_is_refused_before_anything_is_written(folder: Path) -> None:
    """A typing error must not become a statement."""
    pictures = folder / "pictures"
    for arguments, said in (
        (("--basis", "mine"), "basis: must be one of consent, public_domain, own_work, licence"),
        (("--subject", "Anna"), "'Anna' is no pseudonym"),
        (("--retrieved", "30.11.2026"), "must be a date, as 2026-11-30"),
        (("--source", " "), "source: must be a text"),
        (("--for", "*.jpg", "--source", "a"), "--for *.jpg names none of the files"),
        (("--check", "--source", "a"), "--check writes nothing"),
        (("--basis", "consent", "--subject", "none"), "shows nobody who could have given it"),
    ):
        done = manifest(pictures, *arguments)
        assert done.returncode == RecipeError.exit_code, done.stdout
        assert said in done.stderr
    assert not (pictures / "provenance.jsonl").exists()


def test_every_line_that_is_none_is_named(folder: Path) -> None:
    """People write the file by hand; what is misspelt must not count as not stated."""
    digest = "0" * 64
    (folder / "provenance.jsonl").write_text(
        "\n".join(
            [
                "{",
                json.dumps({"file": "a.png", "sha256": digest, "license": "MIT"}),
                json.dumps({"file": "b.png", "sha256": "short"}),
                json.dumps({"file": "c.png", "sha256": digest, "subjects": ANNA}),
                json.dumps({"file": "d.png", "sha256": digest}),
                json.dumps({"file": "d.png", "sha256": digest}),
                "[]",
            ]
        )
    )
    with pytest.raises(SourceError) as caught:
        read_statements(folder)
    for said in (
        "line 1: is not JSON",
        "line 2: 'license' is no field",
        "line 3: sha256: must be a SHA-256",
        "line 4: subjects must be a list",
        "line 6: a second line of d.png",
        "line 7: must be an object",
    ):
        assert said in str(caught.value)
    assert list(faults_in({"basis": ["consent"], "retrieved": 20261130})) != []


def test_training_carries_the_digest_into_journal_checkpoint_and_every_export(
    folder: Path, model: Path
) -> None:
    """An adapter that is given away must lead back to what was stated of its pictures, without a name or a path."""
    recipe = write_recipe(folder, model=model, train={"steps": 2})
    told(folder / "pictures", *ALL, "--for", "0[01]*")
    _, run = train_here(recipe)
    (event,) = [one for one in events_of(run) if one["event"] == "provenance"]
    assert event["lacking"] == 1
    assert event["missing"] == dict.fromkeys(
        ("source", "licence", "basis", "subjects", "retrieved", "transforms"), 1
    )
    stated = stated_of(load_recipe(recipe))
    assert stated is not None
    assert event["digest"] == stated.digest
    (identity,) = [one for one in events_of(run) if one["event"] == "identity"]
    assert identity["provenance"] == stated.digest
    chosen = load_recipe(recipe)
    for dialect in ("comfyui", "diffusers", "diffusion_model", "kohya", "peft"):
        is_folder = dialect == "peft"
        target = folder / (dialect if is_folder else f"{dialect}.safetensors")
        given = export_run(chosen, run, dialect, target)
        (written,) = [one for one in given.exported.files if one.suffix == ".safetensors"]
        with safe_open(written, "pt") as file:
            assert file.metadata()["outsize.provenance"] == stated.digest


def test_training_says_whom_the_stated_subjects_are_to_the_gate(folder: Path, model: Path) -> None:
    """Somebody whom only the pictures' provenance names is asked all the same: here nobody has agreed."""
    recipe = write_recipe(folder, model=model, train={"steps": 2})
    told(folder / "pictures", "--basis", "consent", "--subject", ANNA)
    done = outsize("train", recipe, "--device", "cpu")
    assert done.returncode == 10, done.stderr
    assert ANNA in done.stderr


def test_training_refuses_edited_pictures_and_names_them(folder: Path, model: Path) -> None:
    """Before anything is encoded, and as long as it is not put right."""
    recipe = write_recipe(folder, model=model, train={"steps": 2})
    told(folder / "pictures", *ALL)
    edited = write_picture(folder / "pictures" / "01.png", (48, 48), seed=77)
    with pytest.raises(SourceError, match="1 files were edited after") as caught:
        train_here(recipe)
    assert str(edited) in str(caught.value)
    assert not list((folder / "cache").rglob("*.safetensors"))
    done = outsize("data", "check", recipe)
    assert "1 were edited since: training refuses them" in done.stdout


def test_statements_change_no_byte_that_is_trained(folder: Path, model: Path) -> None:
    """Stating it later, or better, must not cost a training that is under way."""
    recipe = write_recipe(folder, model=model, train={"steps": 2})
    _, run = train_here(recipe)
    told(folder / "pictures", *ALL)
    _, again = train_here(write_recipe(folder, model=model, name="again", train={"steps": 2}))
    before, after = checkpoint_bytes(run), checkpoint_bytes(again)
    assert again.path != run.path
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == ["state.json"]
    trained, _ = train_here(write_recipe(folder, model=model, train={"steps": 2}))
    assert trained.resumed_at == 2


def test_texts_have_a_line_for_each_file_and_the_list_is_no_text(tmp_path: Path) -> None:
    """A list beside the texts must not be learned from; a folder of another kind of data has the same command."""
    texts = tmp_path / "talks"
    texts.mkdir()
    write_talks(texts / "a.jsonl", 8)
    write_talks(texts / "b.jsonl", 8)
    assert told(texts, *ALL)["files"] == 2
    assert set(lines_of(texts)) == {"a.jsonl", "b.jsonl"}
    recipe = write_text_recipe(
        tmp_path, model=write_language(tmp_path / "model"), data={"sets": [{"path": "talks"}]}
    )
    checked = outsize("data", "check", recipe, "--json")
    assert checked.returncode == 0, checked.stderr
    facts = json.loads(checked.stdout)["provenance"]
    assert (facts["files"], facts["missing"], facts["faults"]) == (2, {}, [])
    stated = stated_of(load_recipe(recipe))
    assert stated is not None
    assert stated.digest == facts["digest"]
    (texts / "b.jsonl").write_text("{}")
    with pytest.raises(SourceError, match=r"b\.jsonl"):
        stated_of(load_recipe(recipe))


def test_the_digest_is_of_what_is_stated_wherever_files_lie(folder: Path, model: Path) -> None:
    """A renamed folder is the same data; another licence is another statement."""
    first = stated_digest(folder, model)
    (folder / "pictures" / "00.png").rename(folder / "pictures" / "zz.png")
    (folder / "pictures" / "00.txt").rename(folder / "pictures" / "zz.txt")
    assert stated_digest(folder, model) == first
    assert stated_digest(folder, model, "--licence", "MIT", "--replace") != first


def stated_digest(folder: Path, model: Path, *more: str) -> str:
    told(folder / "pictures", *(more or ALL))
    stated = stated_of(load_recipe(write_recipe(folder, model=model)))
    assert stated is not None
    return stated.digest


def events_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.journal.read_text().splitlines()]


def test_without_statements_all_faults_of_the_pictures_are_still_told_at_once(
    folder: Path, model: Path
) -> None:
    """Looking for statements must not stop at captions before pictures were looked at."""
    (folder / "pictures" / "00.txt").write_bytes(b"\xff\xfe\xff")
    (folder / "pictures" / "01.png").write_bytes(b"torn")
    with pytest.raises(SourceError) as caught:
        train_here(write_recipe(folder, model=model))
    assert "2 faults" in str(caught.value)
