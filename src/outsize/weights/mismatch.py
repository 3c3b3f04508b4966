"""What to say when files do not hold a model: all that is missing or wrong, numbered names drawn together, and a remedy.

Beside the files may lie an index and a config.json; they are asked here, where something is wrong, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outsize.base.files import parse_json
from outsize.weights.choice import INDEX_END
from outsize.weights.foreign import config_beside

_MAX_EXTRA = 12  # what the files hold besides is a hint, not a fault, and stays short
_MAX_FILES = 3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How one layout fares in a source's files.

    needed: names that the layout wants. missing: of those. wrong: (name, what is wrong with it). unfit: (name, why its 4
    bits cannot be taken as they are). is_damaged: whether what is unfit would be so in any format. unread: (name, what of its
    scales is not understood).
    """

    layout: str
    needed: frozenset[str]
    missing: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...]
    unfit: tuple[tuple[str, str], ...]
    is_damaged: bool
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def num_faults(self) -> int:
        return len(self.missing) + len(self.wrong) + len(self.unfit) + len(self.unread)

    def message(self, files: Sequence[Path], names: Collection[str]) -> str:
        """All of it. files: of the source. names: of all tensors in them."""
        where = ", ".join(str(file) for file in files[:_MAX_FILES])
        if len(files) > _MAX_FILES:
            where += f" and {len(files) - _MAX_FILES} files more"
        if self.unfit and not (self.missing or self.wrong or self.unread):
            lines = [f"{where}: matrices in 4 bits that cannot be taken as they are"]
        elif self.unread and not (self.missing or self.wrong or self.unfit):
            lines = [f"{where}: 8-bit floats with scales that are not understood"]
        else:
            lines = [f"{where} do not hold the model; nearest is layout {self.layout!r}"]
        if self.missing:
            lines.append(f"missing ({len(self.missing)} of {len(self.needed)}):")
            lines += _drawn((name, "") for name in self.missing)
        if self.wrong:
            lines.append(f"not as expected ({len(self.wrong)}):")
            lines += _drawn(self.wrong)
        if self.unfit:
            lines.append(f"in 4 bits ({len({name for name, _ in self.unfit})}):")
            lines += _drawn(self.unfit)
        if self.unread:
            lines.append(f"in 8 bits ({len({name for name, _ in self.unread})}):")
            lines += _drawn(self.unread)
        lines += self._extra(names)
        lines.append(self._remedy(files))
        return "\n".join(lines)

    def _extra(self, names: Collection[str]) -> list[str]:
        extra = [name for name in names if name not in self.needed]
        if not (extra and self.missing):
            return []
        lines = _drawn((name, "") for name in extra)
        more = [f"  and {len(lines) - _MAX_EXTRA} groups of names more"]
        return [
            f"in the files, but of no use ({len(extra)}):",
            *lines[:_MAX_EXTRA],
            *(more if len(lines) > _MAX_EXTRA else ()),
        ]

    def _remedy(self, files: Sequence[Path]) -> str:
        by_index = _what_the_index_says(files, self.missing)
        if by_index is not None:
            return by_index
        model = _what_the_config_says(files)
        if 2 * len(self.missing) > len(self.needed):
            return (
                f"This looks like another model{model}: check the path, and `family` in the recipe."
            )
        if self.missing:
            return (
                "If shards were left out (no index beside the files), download them; "
                f"else check `family` and `variant` in the recipe{model}."
            )
        if self.wrong:
            return f"The names fit and the tensors do not: check `variant` in the recipe{model}."
        if self.unread:
            return (
                "Weights would be wrong by what is not understood: take the model's bf16 files, or its files in 8 bits "
                "with one scale for each matrix, row or group."
            )
        first = (
            "Download the files again, if they are not as they were published"
            if self.is_damaged
            else "Change the format in the recipe where a line says how"
        )
        return f"{first}; else take the model's bf16 files, which any format can be made of."


def draw_together(names: Iterable[tuple[str, str]]) -> list[str]:
    """Names with remarks as lines, those that differ in their numbers only as one: "blocks.{0..7}.w (8)"."""
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, remark in names:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        groups.setdefault((_NUMBER.sub("\0", name), remark), []).append(numbers)
    lines = []
    for (pattern, remark), rows in groups.items():
        columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
        pieces = pattern.split("\0")
        text = pieces[0] + "".join(
            _ranges(column) + piece for column, piece in zip(columns, pieces[1:], strict=True)
        )
        count = f" ({len(rows)})" if len(rows) > 1 else ""
        lines.append(f"{text}{count}{' ' if remark else ''}{remark}")
    return lines


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _drawn(names: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {text}" for text in draw_together(names)]


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text: "3", "{0..7}", "{0..2,5}"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def _what_the_config_says(files: Sequence[Path]) -> str:
    """In brackets, after "another model": what a config.json calls it, or nothing."""
    config = config_beside(files)
    named = config.get("architectures") or [config.get("_class_name") or config.get("model_type")]
    name = named[0] if isinstance(named, list) else None
    return f" (its config.json says {name})" if isinstance(name, str) and name.isprintable() else ""


def _what_the_index_says(files: Sequence[Path], missing: Sequence[str]) -> str | None:
    """Whether an index beside the files knows better where missing tensors are, or does not know a file that is there."""
    if not missing:
        return None
    there = {file.name for file in files}
    for index in sorted(files[0].parent.glob(f"*{INDEX_END}")):
        try:
            places = parse_json(index.read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not isinstance(places, dict) or not there & set(map(str, places.values())):
            continue  # the index of another model in the same folder
        lacking = [(name, f"is not in {places[name]}") for name in missing if name in places]
        if lacking:
            few = "; ".join(draw_together(lacking)[:_MAX_EXTRA])
            return f"{index.name} names shards that lack what it places there: {few}. Download these shards again."
        stem = index.name.removesuffix(INDEX_END)
        beside = sorted(
            file.name
            for file in index.parent.glob(f"{stem}*.safetensors")
            if file.name not in there
        )
        if beside:
            return (
                f"{index.name} does not name {', '.join(beside[:_MAX_EXTRA])}, which lie beside it and are not read: "
                "download the index again, of the same revision as the shards."
            )
    return None
