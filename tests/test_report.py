"""The page of a run: what it says is what the journal says, whatever people or kills wrote there, and it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from report_support import EVIL, EVIL_ATTRIBUTE, step_event, write_run, write_session
from run_support import outsize, train_here, write_recipe
from tiny import write_tiny

from outsize.app.report.figures import phases_of, warnings_of
from outsize.app.report.history import FIELDS, Resume, Step, read_history
from outsize.app.report.markup import element, join, table, text
from outsize.app.report.page import as_script_data, page_of, write_report
from outsize.app.report.shown import MOST_PREVIEWS, previews_of
from outsize.app.report.thinning import thinned
from outsize.base.errors import NotFinite
from outsize.base.journal import Journal
from outsize.cli.report import reported
from outsize.runs.folder import RunFolder


class Reader(HTMLParser):
    """Elements, attributes and texts as a browser's parser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "input", "br", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def _data(page: str) -> Any:
    return json.loads(Reader(page).scripts[0])


# --- the journal, in order -------------------------------------------------------------------------


def test_a_run_that_was_killed_and_resumed_has_each_step_once(tmp_path: Path) -> None:
    """Killed after step 17 with a checkpoint of 10: 11 to 17 were taken twice, and the later ones count."""
    run = RunFolder(tmp_path)
    write_session(run, range(1, 18))
    write_session(run, range(11, 21), resumed=10, end="completed")
    journal = Journal(run.journal)
    journal.write("device", kind="cpu")  # `outsize compare` comes after, and is no training
    journal.write("stage", name="sample base", seconds=1.0, device_bytes=0, host_bytes=1)
    journal.close()
    history = read_history(run)
    assert [one.number for one in history.steps] == list(range(1, 21))
    assert history.resumes == [Resume(10, 7)]
    assert history.num_sessions == 2
    assert [one["name"] for one in history.latest["stage"]] == ["load base", "train"]
    assert history.end["event"] == "completed"
    assert "7 steps after step 10 were lost with a kill" in warnings_of(history)[-1].text
    assert "lost" not in json.dumps(_data(page_of(run))["series"])


def test_torn_lines_and_values_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    journal = Journal(run.journal)
    odd: list[Any] = [float("nan"), float("inf"), None, "0.5", True, [1]]
    for step, loss in enumerate([0.5, *odd, 0.25], start=1):
        journal.write("step", **step_event(step) | {"loss": loss})
    journal.close()
    with run.journal.open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "step": 9, "lo')
    history = read_history(run)
    assert [one.values["loss"] for one in history.steps] == [0.5, *[None] * len(odd), 0.25]
    page = page_of(run)
    assert _data(page)["series"]["loss"]["mean"] == [0.5, *[None] * len(odd), 0.25]
    assert "NaN" not in page
    assert "Infinity" not in page.replace("Number.isFinite", "")


@pytest.mark.parametrize("content", ["", "\n\n", "[1, 2]\n3\nnull\n", "\ufffd{}\n{}\n"])
def test_a_folder_that_holds_next_to_nothing_gives_a_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "journal.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "plan.json").write_text("{", encoding="utf-8")
    (tmp_path / "recipe.json").write_text("[]", encoding="utf-8")
    page = page_of(RunFolder(tmp_path))
    assert "nothing is recorded yet" in page
    assert _data(page)["series"]["step"] == []


# --- fewer points ----------------------------------------------------------------------------------


def _steps(numbers: list[int], losses: list[float | None]) -> list[Step]:
    blank = dict.fromkeys(FIELDS)
    return [
        Step(number, 0.0, {**blank, "loss": loss})
        for number, loss in zip(numbers, losses, strict=True)
    ]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=120, unique=True), st.integers(1, 40))
def test_thinning_keeps_extremes_and_says_where_steps_are_missing(
    numbers: list[int], most: int
) -> None:
    """Points are in order, each holds exactly the steps of its stretch, and a stretch without steps holds none."""
    numbers = sorted(numbers)
    losses = [math.sin(number * 7.0) for number in numbers]
    found = thinned(_steps(numbers, list(losses)), most)
    width, first = found["width"], numbers[0]
    assert found["step"] == sorted(set(found["step"]))
    whole = [one for one in found["loss"]["mean"] if one is not None]
    assert len(whole) <= most
    rough = 1e-5
    assert min(one for one in found["loss"]["lo"] if one is not None) == pytest.approx(
        min(losses), abs=rough
    )
    assert max(one for one in found["loss"]["hi"] if one is not None) == pytest.approx(
        max(losses), abs=rough
    )
    by_place: dict[int, list[float]] = {}
    for number, loss in zip(numbers, losses, strict=True):
        by_place.setdefault((number - first) // width, []).append(loss)
    expected = [sum(group) / len(group) for _, group in sorted(by_place.items())]
    assert whole == pytest.approx(expected, abs=rough)
    places = sorted(by_place)
    num_gaps = sum(b > a + 1 for a, b in itertools.pairwise(places))
    assert found["loss"]["mean"].count(None) == num_gaps


def test_a_hundred_thousand_steps_are_a_page_of_ordinary_size(tmp_path: Path) -> None:
    """One spike among them is still there."""
    run = RunFolder(tmp_path)
    journal = Journal(run.journal)
    for step in range(1, 100_001):
        journal.write("step", **step_event(step, 99.0 if step == 77_777 else 0.5))
    journal.close()
    page = page_of(run)
    assert len(page) < 1_500_000
    series = _data(page)["series"]
    assert series["width"] == 50
    assert len(series["step"]) == 2000
    assert max(series["loss"]["hi"]) == 99.0
    assert series["loss"]["hi"].index(99.0) == (77_777 - 1) // 50
    assert series["loss"]["mean"][(77_777 - 1) // 50] == pytest.approx((49 * 0.5 + 99) / 50)


# --- text is text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [EVIL, EVIL_ATTRIBUTE, "a & b < c \u2028 d", "\x00\x1b[31m"])
def test_what_people_wrote_is_text_and_nothing_else(tmp_path: Path, said: str) -> None:
    """In captions, names, prompts, warnings, notes: no element, no attribute, no script comes of it."""
    plain = Reader(page_of(write_run(tmp_path / "plain")))
    evil = Reader(page_of(write_run(tmp_path / "evil", said=said)))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in evil.tags]
    for (_, one), (_, other) in zip(plain.tags, evil.tags, strict=True):
        assert one.keys() == other.keys()
    assert len(evil.scripts) == 2
    shown = "".join(one if one >= " " else "\ufffd" for one in said)
    assert any(shown in words for words in evil.words)
    assert any(shown in str(one["alt"]) for one in evil.of("img"))


@given(st.text())
def test_data_in_a_script_cannot_end_it_and_reads_back(value: str) -> None:
    written = as_script_data({"value": value, value: [1]})
    assert not re.search(r"[<>&\u2028\u2029]", written)
    assert json.loads(written) == {"value": value, value: [1]}


def test_markup_escapes_all_that_is_not_markup() -> None:
    made = element("p", "<b>", element("b", "&"), title='"', class_=None)
    assert made == '<p title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert join("<", text("<")) == "&lt;&lt;"
    assert "<td>" not in table("x", ("a",), [("<td>",)])


# --- the page --------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_lets_nothing_else_run(tmp_path: Path) -> None:
    """No address in it but the name of SVG's language; script and style are those that its policy names."""
    page = page_of(write_run(tmp_path / "run"))
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/2000/svg"}
    reader = Reader(page)
    assert not reader.of("link")
    for attributes in (*reader.of("img"), *reader.of("script"), *reader.of("a")):
        source = attributes.get("src") or attributes.get("href") or "data:"
        assert source.startswith(("data:image/jpeg;base64,", "data:", "#"))
    (policy,) = [
        str(one["content"])
        for one in reader.of("meta")
        if one.get("http-equiv") == "Content-Security-Policy"
    ]
    style = page.split("<style>")[1].split("</style>")[0]
    for content in (style, reader.scripts[1]):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not any(
        "style" in attributes or "onclick" in attributes for _, attributes in reader.tags
    )


def test_the_page_says_what_the_run_was(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    words = " ".join(Reader(page_of(run)).words)
    for expected in (
        "completed", "120 / 120", "flux2 dev", "A card", "c3" * 20, "d4" * 32, "e5" * 32, "torch 2.9.1",
        "all blocks fit", "56 packed blocks", "first step done", "step 60", "base against adapter (001)",
    ):  # fmt: skip
        assert expected in words, expected
    assert str(Path.home()) not in words
    assert "~/models/a fox" in words


def test_every_chart_has_a_name_and_its_numbers_as_a_table(tmp_path: Path) -> None:
    reader = Reader(page_of(write_run(tmp_path / "run")))
    charts = [one for one in reader.of("div") if one.get("class") == "chart"]
    names = {str(one["id"]) for one in charts}
    assert names == {
        f"chart-{name}" for name in ("loss", "rate", "norm", "seconds", "memory", "usage", "boot")
    }
    assert all(one["data-title"] for one in charts)
    captions = len(reader.of("caption"))
    assert captions == len(reader.of("table")) >= 6
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in reader.tags:
        for key in ("aria-labelledby", "for"):
            if key in attributes:
                assert attributes[key] in ids
    assert all(one["alt"] for one in reader.of("img"))
    assert [one["lang"] for one in reader.of("html")] == ["en"]


def test_a_stage_of_several_phases_is_marked_on_the_largest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    plan["phases"][1]["items"] = plan["phases"][1]["items"][1:]
    found = phases_of(plan, read_history(run))
    assert [(one.name, one.measured) for one in found] == [
        ("train step", 4 << 30), ("train update", None),
    ]  # fmt: skip
    assert found[0].planned == 3 << 30, "the driver's memory is measured by nobody"


def test_pictures_are_small_enough_and_a_long_run_shows_a_choice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, previews=0)
    for step in range(0, 1000, 10):
        folder = run.previews / f"{step:08d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (1600, 400)).save(folder / "grid.png")
    (run.previews / "00000500" / "grid.png").write_bytes(b"no picture")
    found, left_out = previews_of(run)
    assert (len(found), left_out) == (MOST_PREVIEWS, 60)
    assert (found[0].step, found[-1].step) == (0, 990)
    assert all(one.picture is None or one.picture.width == 960 for one in found)
    assert page_of(run)


def test_latents_that_wait_and_texts_are_shown_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", previews=0)
    waiting, written = run.previews / "00000010", run.previews / "00000020"
    for folder in (waiting, written):
        folder.mkdir(parents=True)
    (waiting / "preview.json").write_text('{"pictures": [{"prompt": "x"}]}', encoding="utf-8")
    texts = [{"prompt": "who?", "seed": 3, "text": "a <fox>", "has_ended": True}]
    (written / "preview.json").write_text(json.dumps({"texts": texts}), encoding="utf-8")
    words = " ".join(Reader(page_of(run)).words)
    assert "latents wait in the run folder" in words
    assert "who? (seed 3)" in words
    assert "a <fox>" in words


# --- commands --------------------------------------------------------------------------------------


def test_training_ends_with_a_report_and_the_command_writes_it_again(tmp_path: Path) -> None:
    """The real command, on a tiny base, with previews: numbers of the page are those of the journal."""
    model = write_tiny("flux2", "tiny", tmp_path / "model")
    recipe = write_recipe(
        tmp_path, model=model, previews={"every": 3, "steps": 1, "width": 32, "height": 32},
        train={"steps": 4},
    )  # fmt: skip
    done = outsize("train", recipe, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "runs" / "run")
    assert f"report: {run.report}" in done.stdout
    first = run.report.read_text(encoding="utf-8")
    data = _data(first)
    losses = [one.values["loss"] for one in read_history(run).steps]
    assert data["series"]["loss"]["mean"] == pytest.approx(losses, rel=1e-5)
    assert data["previews"] == [0, 3, 4]
    assert len(Reader(first).of("img")) == 3
    assert {one["name"] for one in data["phases"]} >= {"train step", "preview", "decode previews"}
    measured = {one["name"]: one["measured"] for one in data["phases"]}
    assert measured["train step"] > 0
    assert measured["preview"] > 0
    run.report.unlink()
    again = outsize("report", run.path)
    assert again.returncode == 0, again.stderr
    assert run.report.read_text(encoding="utf-8") == first
    assert outsize("report", recipe).returncode == 0


def test_a_run_that_was_never_trained_has_no_report(tmp_path: Path) -> None:
    model = write_tiny("flux2", "tiny", tmp_path / "model")
    done = outsize("report", write_recipe(tmp_path, model=model))
    assert done.returncode == 2
    assert "holds no journal yet; train first" in done.stderr


def test_a_training_that_fails_leaves_a_report_that_says_why(tmp_path: Path) -> None:
    model = write_tiny("flux2", "tiny", tmp_path / "model")
    recipe = write_recipe(tmp_path, model=model, train={"learning_rate": 1e30, "clip_norm": None})
    run = RunFolder(tmp_path / "runs" / "run")
    with pytest.raises(NotFinite), reported(run):
        train_here(recipe)
    words = " ".join(Reader(run.report.read_text(encoding="utf-8")).words)
    assert "a training failed: NotFinite" in words


def test_a_report_that_cannot_be_written_hides_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(KeyError, match="first"), reported(RunFolder(tmp_path / "file" / "run")):
        raise KeyError("first")
    assert "no report could be written" in capsys.readouterr().err


def test_a_report_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    before = write_report(run).read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(run)
    assert run.report.read_bytes() == before
    assert not list(run.path.glob(".tmp-*"))
