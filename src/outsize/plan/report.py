"""A plan for people: rows of text, which the front end lays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.base.units import format_bytes
from outsize.plan.estimate import Holding
from outsize.plan.plan import Choice, Comparison, Plan


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column heads and rows of cells; all columns but the first and the last hold sizes."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def headline(plan: Plan) -> str:
    """What was planned, and for what machine."""
    machine, budget = plan.machine, plan.budget
    parts = [machine.device]
    if machine.vram_bytes is not None and budget.device_bytes is not None:
        parts.append(
            f"{format_bytes(machine.vram_bytes)}, {format_bytes(budget.device_bytes)} usable"
        )
    parts.append(f"RAM {format_bytes(machine.ram_bytes)}, {format_bytes(budget.host_bytes)} usable")
    stated = " (stated)" if machine.is_stated else ""
    return f"{plan.name}: {plan.base} on {'; '.join(parts)}{stated}"


def tables(plan: Plan) -> tuple[Table, ...]:
    """Phases, owners of the training step, and the disk."""
    return phase_table(plan), owner_table(plan), disk_table(plan)


def phase_table(plan: Plan) -> Table:
    """One row for each phase: memory is staged, so the peak is the largest row."""
    rows = [
        (
            phase.name,
            _size(phase.device_bytes),
            _size(phase.total("pinned")),
            _size(phase.total("private")),
            "" if phase.holding is None else _holding(phase.holding),
        )
        for phase in plan.phases
    ]
    heads = ("phase", "device", "pinned RAM", "other RAM", "blocks")
    return Table("by phase (one at a time)", heads, tuple(rows))


def owner_table(plan: Plan) -> Table:
    """Every owner in the training step, in whatever pool it lies."""
    step = next(phase for phase in plan.phases if phase.name == "train step")
    rows = tuple(
        (item.owner, format_bytes(item.num_bytes), item.pool, item.why)
        for item in step.items
        if item.num_bytes
    )
    return Table("of the training step", ("owner", "bytes", "where", "why"), rows)


def disk_table(plan: Plan) -> Table:
    """What is written, once."""
    rows = tuple((item.owner, format_bytes(item.num_bytes), item.why) for item in plan.disk)
    return Table("on disk", ("what", "bytes", "why"), rows)


def sentences(plan: Plan) -> Iterator[str]:
    """The choice, the runner-up and the notes."""
    yield f"placement: {_chosen(plan.chosen)}"
    if plan.runner_up is not None:
        yield f"runner-up: {_chosen(plan.runner_up)}"
    yield from (f"note: {note}" for note in plan.notes)


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Estimates beside measurements; what is further off than an estimate may be is marked."""
    cells = tuple(
        (
            row.stage,
            row.pool,
            format_bytes(row.planned_bytes),
            format_bytes(row.measured_bytes),
            f"{row.off:+.0%}",
            "" if row.is_within_tolerance else "beyond tolerance",
        )
        for row in rows
    )
    heads = ("stage", "memory", "planned", "measured", "off", "")
    return Table("Plan against measured", heads, cells)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _holding(holding: Holding) -> str:
    if not holding.num_streamed:
        return f"{holding.kind}, all {holding.num_blocks}"
    return f"{holding.kind}, {len(holding.resident)} of {holding.num_blocks} kept"


def _chosen(choice: Choice) -> str:
    peak = format_bytes(choice.host_bytes)
    if choice.device_bytes:
        peak = f"{format_bytes(choice.device_bytes)} on the device, {peak} of RAM"
    return f"{_holding(choice.holding)} (peak {peak}): {choice.why}"
