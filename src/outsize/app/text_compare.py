"""Base against adapter in words: the same prompts and seeds, side by side, and control prompts that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outsize.app.attached import require_adapter
from outsize.app.people import people_rendered
from outsize.app.tasks.protocol import Compared, Table, numbered
from outsize.app.write import Scribe, Written, settings_of, write_with
from outsize.base.files import folder_committed_to, write_atomically, write_json_atomically

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.runs.folder import RunFolder

PAGE = "compare.md"
MAX_DEFAULT_PROMPTS = 4  # beginnings of held-out texts taken when the recipe names no prompts
_CELL = 60  # characters of a text that a table shows


def compare_texts(site: Site, run: RunFolder) -> Compared:
    """Write the recipe's prompts and controls with and without the run's adapter.

    Raises: RecipeError, before any model is opened, when the run has no adapter of this recipe.
    """
    require_adapter(site, run)
    choice, scribe = site.recipe.compare, Scribe(site)
    prompts = [scribe.worded(one) for one in choice.prompts]
    prompts = prompts or scribe.beginnings(MAX_DEFAULT_PROMPTS)
    controls = [scribe.worded(one) for one in choice.controls]
    asks = [(prompt, seed) for prompt in (*prompts, *controls) for seed in choice.seeds]
    made = dict(write_with(site, run, scribe, asks, adapters=(False, True)))
    pairs = list(zip(made[False], made[True], strict=True))
    num_subject = len(prompts) * len(choice.seeds)
    folder = numbered(run.path / "compare")
    with folder_committed_to(folder) as written:
        page = page_of(site, pairs[:num_subject], pairs[num_subject:])
        write_atomically(written / PAGE, page.encode())
        rows = [_row(before, after) for before, after in pairs]
        values = {"settings": asdict(settings_of(site)), "texts": rows}
        write_json_atomically(written / "compare.json", values)
    people_rendered(site, run, with_adapter=True).note("sample", [folder])
    equal = [before.ids == after.ids for before, after in pairs]
    site.journal.write(
        "compared", folder=folder.name, changed=equal[:num_subject].count(False),
        controls_changed=equal[num_subject:].count(False),
    )  # fmt: skip
    return Compared(folder, _table(pairs), (("side by side", folder / PAGE),))


def _row(before: Written, after: Written) -> dict[str, Any]:
    common = sum(
        1 for _ in _while_equal(before.ids, after.ids)
    )  # how far the two say the same, in tokens
    return {
        "prompt": before.prompt.shown,
        "seed": before.seed,
        "base": before.text,
        "adapter": after.text,
        "base_ended": before.has_ended,
        "adapter_ended": after.has_ended,
        "tokens_in_common": common,
    }


def _while_equal(one: Sequence[int], other: Sequence[int]) -> list[int]:
    found = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        found.append(a)
    return found


def _table(pairs: Sequence[tuple[Written, Written]]) -> Table:
    rows = tuple(
        (_short(before.prompt.shown), _short(before.text), _short(after.text))
        for before, after in pairs
    )
    return Table("Base against adapter", ("prompt", "base", "adapter"), rows, has_figures=False)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CELL else f"{line[: _CELL - 3]}..."


def page_of(
    site: Site,
    subject: Sequence[tuple[Written, Written]],
    control: Sequence[tuple[Written, Written]],
) -> str:
    """Texts by base and adapter, for people."""
    recipe = site.recipe
    lines = [f"# {recipe.name}: {recipe.base.family} {recipe.base.variant}", ""]
    for title, pairs in (("Prompts", subject), ("Controls", control)):
        if pairs:
            lines += [f"## {title}", ""]
        for before, after in pairs:
            lines += [
                f"### {_short(before.prompt.shown)} (seed {before.seed})", "",
                "Prompt:", "", *_quoted(before.prompt.shown), "",
                "Base:", "", *_quoted(before.text), "",
                "With the adapter:", "", *_quoted(after.text), "",
            ]  # fmt: skip
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    """As a block that no renderer takes for anything but text."""
    return [f"    {line}" for line in text.splitlines() or [""]]
