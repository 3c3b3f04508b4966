"""The page of a run in a browser: clicked, dragged, typed into, in light and dark; skipped where there is no browser.

Needs playwright (`pip install -e .[browser]`) and Chromium: the one of the system, or playwright's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_support import EVIL, write_run, write_session

from outsize.app.report.page import write_report
from outsize.runs.folder import RunFolder

playwright = pytest.importorskip("playwright.sync_api")

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SMOOTH = "#chart-loss path.smooth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        own = Path(driver.chromium.executable_path)
        if found is None and not own.exists():
            pytest.skip("no Chromium is installed")
        # a container's root has no sandbox of its own; the page is ours
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        options = ["--no-sandbox"] if is_root else []
        opened = driver.chromium.launch(executable_path=found, args=options)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose people wrote scripts into everything, killed once, with a hole."""
    run = write_run(tmp_path_factory.mktemp("browser") / "run", said=EVIL)
    run.journal.unlink()
    write_session(run, [*range(1, 40), *range(60, 100)])
    write_session(run, range(81, 121), resumed=80, end="completed")
    return write_report(run)


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The page, which must complain of nothing and ask for nothing."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    assert opened.title() == "run: Outsize", "no text became a script"
    assert complaints == []
    assert [one for one in asked if not one.startswith(("file:", "data:"))] == []
    opened.close()


def _path(page: Any, selector: str = _SMOOTH) -> str:
    found: str = page.locator(selector).first.get_attribute("d")
    return found


def test_all_charts_are_drawn_and_a_hole_stays_one(page: Any) -> None:
    for name in ("loss", "rate", "norm", "seconds", "memory", "usage", "boot"):
        assert page.locator(f"#chart-{name} svg").first.locator("path, rect, circle").count() > 0
    assert _path(page).count("M") == 2, "the line is broken where steps are missing"
    assert page.locator("#chart-loss line.mark").count() == 1
    assert page.locator("#chart-loss svg").first.get_attribute("role") == "img"
    assert page.locator("#chart-loss svg").first.get_attribute("aria-label")


def test_the_smoothing_slider_changes_the_smoothed_line_alone(page: Any) -> None:
    smooth, raw = _path(page), _path(page, "#chart-loss path.raw")
    page.locator("#smoothing").fill("0")
    assert page.locator("#smoothing-value").inner_text() == "0.00"
    assert _path(page) != smooth
    assert _path(page, "#chart-loss path.raw") == raw
    assert _path(page) == raw, "without smoothing both are the same line"


def test_pointing_reads_values_out(page: Any) -> None:
    box = page.locator("#chart-loss svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 100)
    tip = page.locator("#chart-loss .tip")
    assert tip.is_visible()
    assert tip.inner_text().splitlines()[0] == "step 120"
    assert "smoothed" in page.locator("#readout").inner_text()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] - 200)
    assert not tip.is_visible()
    box = page.locator("#chart-seconds svg").first.bounding_box()
    page.locator("#chart-seconds svg").first.scroll_into_view_if_needed()
    page.locator("#chart-seconds svg").first.hover(position={"x": box["width"] - 20, "y": 60})
    said = page.locator("#chart-seconds .tip").inner_text()
    assert "computing 400 ms (80 %)" in said
    assert "waiting for copies 75 ms (15 %)" in said
    assert "host 25 ms (5 %)" in said


def test_dragging_zooms_all_charts_and_a_button_shows_all_again(page: Any) -> None:
    before = _path(page)
    box = page.locator("#chart-loss svg").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 100, steps=4)
    page.mouse.up()
    start = int(page.locator("#from-value").inner_text())
    end = int(page.locator("#to-value").inner_text())
    assert 1 < start < end < 120
    assert _path(page) != before
    page.locator("#reset").click()
    assert page.locator("#from-value").inner_text() == "1"
    assert _path(page) == before
    page.locator("#from").fill("500")
    assert 50 <= int(page.locator("#from-value").inner_text()) <= 70


def test_arrow_keys_read_values_and_escape_shows_all(page: Any) -> None:
    page.locator("#chart-loss svg").first.focus()
    page.keyboard.press("Home")
    assert page.locator("#readout").inner_text().startswith("step 1,")
    page.keyboard.press("ArrowRight")
    assert page.locator("#readout").inner_text().startswith("step 2,")
    page.keyboard.press("End")
    assert page.locator("#readout").inner_text().startswith("step 120,")
    page.locator("#from").fill("500")
    page.locator("#chart-loss svg").first.focus()
    page.keyboard.press("Escape")
    assert page.locator("#from-value").inner_text() == "1"


def test_a_logarithmic_loss_moves_the_line(page: Any) -> None:
    before = _path(page)
    page.locator("#log").check()
    assert _path(page) != before
    page.locator("#log").uncheck()
    assert _path(page) == before


def test_previews_are_turned_by_buttons_and_slider(page: Any) -> None:
    def visible() -> list[str]:
        return [
            one.get_attribute("data-step")
            for one in page.locator("figure.preview").all()
            if one.is_visible()
        ]

    assert visible() == ["120"]
    assert page.locator("#preview-on").is_disabled()
    page.locator("#preview-back").click()
    assert visible() == ["60"]
    page.locator("#preview-place").fill("0")
    assert visible() == ["0"]
    assert page.locator("#preview-step").inner_text() == "step 0"
    shown = "figure.preview:not([hidden]) img"
    assert page.evaluate(f"document.querySelector({shown!r}).naturalWidth") == 960


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_paper_in_light_and_dark(
    page: Any, scheme: str, tmp_path: Path
) -> None:
    """Contrast of 4.5 and more, as WCAG asks of text, of every kind of text on its card."""
    page.emulate_media(color_scheme=scheme)
    ratio = """([a, b]) => {
        const of = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number)
            .map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        const light = (c) => 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
        const [x, y] = [light(of(a)), light(of(b))].sort((m, n) => n - m);
        return (x + 0.05) / (y + 0.05);
    }"""
    colour = "(s) => getComputedStyle(document.querySelector(s)).color"
    card = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    page_colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, page_colour[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    for kind in ("h2", ".lead", "summary", "td", "figcaption", ".warnings li", ".state"):
        found = page.evaluate(colour, kind)
        assert page.evaluate(ratio, [found, card]) >= 4.5, kind
    page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
    assert (tmp_path / f"{scheme}.png").stat().st_size > 50_000


def test_labels_of_tables_keep_their_words_whole(page: Any) -> None:
    """Long digests beside them must not squeeze them to a letter a line."""
    for one in page.locator("#identity tbody th").all():
        assert one.bounding_box()["width"] >= 120, one.inner_text()


def test_nothing_is_wider_than_a_telephone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for one in page.locator("details").all():
        one.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_of_no_step_and_of_one_are_pages_as_well(browser: Any, tmp_path: Path) -> None:
    for count in (0, 1):
        run = RunFolder(tmp_path / f"run{count}")
        run.path.mkdir()
        write_session(run, range(1, count + 1))
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message, seen=complaints: seen.append(message.text))
        page.on("pageerror", lambda error, seen=complaints: seen.append(str(error)))
        page.goto(write_report(run).as_uri())
        assert page.locator("h1").inner_text() == f"run{count}"
        assert page.locator("#chart-loss circle").count() >= count
        assert complaints == []
        page.close()
