"""A plan for people: rows of text, which the front end lays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.base.tiers import TIERS
from outsize.base.units import format_bytes, format_seconds
from outsize.plan.compare import Comparison
from outsize.plan.plan import Choice, Plan
from outsize.plan.pools import Holding


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
    """Phases, owners of the training step, the disk, seconds, and the rates behind them."""
    bytes_ = (phase_table(plan), owner_table(plan), disk_table(plan))
    return (*bytes_, time_table(plan), rate_table(plan))


def phase_table(plan: Plan) -> Table:
    """One row for each phase: memory is staged, so the peak is the largest row."""
    rows = [
        (
            phase.name,
            _size(phase.device_bytes),
            _size(phase.total("pinned")),
            _size(phase.total("private")),
            _size(phase.total("cached")),
            _size(phase.total("disk")),
            "" if phase.holding is None else _holding(phase.holding),
        )
        for phase in plan.phases
    ]
    heads = ("phase", "device", "pinned", "private", "page cache", "from disk", "blocks")
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


def time_table(plan: Plan) -> Table:
    """A start by parts, what only a first start pays, one step, and all of training."""
    times, step = plan.times, plan.step
    rows = [(f"start: {part.name}", part.seconds, part.why) for part in times.boot]
    rows.append(("start, in all", times.boot_s, "to the end of the first step, with warm caches"))
    if times.compile_s:
        rows.append(("first start: compiling", times.compile_s, "kept for later starts"))
    rows += [(part.name, part.seconds, f"{part.why}; once") for part in times.prepare]
    rows.append(("step", step.seconds, _bound(plan)))
    why = f"{times.num_steps} steps and a start; without preparing, caching, previews and held-out losses"
    rows.append(("training", plan.training_s, why))
    cells = tuple((name, format_seconds(seconds), why) for name, seconds, why in rows)
    return Table("seconds", ("what", "time", "why"), cells)


def rate_table(plan: Plan) -> Table:
    """The rates that the seconds come from, each with its origin."""
    rates = plan.rates
    rows = [
        (f"products in {name}", f"{flops / 1e12:.0f} TFLOP/s", rates.origin("matmul_flops"))
        for name, flops in rates.matmul_flops.items()
    ]
    rows.append(
        (
            "attention",
            f"{rates.attention_flops / 1e12:.0f} TFLOP/s",
            rates.origin("attention_flops"),
        )
    )
    for name, field in _RATES.items():
        value = getattr(rates, field)
        rows.append((name, f"{value / 1e9:.3g} GB/s", rates.origin(field)))
    return Table("rates", ("what", "rate", "from"), tuple(rows))


_RATES = {
    "decoding": "decode_bytes_per_s",
    "device memory": "device_memory_bytes_per_s",
    "bus": "bus_bytes_per_s",
    "staging": "staging_bytes_per_s",
    "disk, reading": "disk_read_bytes_per_s",
    "disk, writing": "disk_write_bytes_per_s",
    "first touch of RAM": "first_touch_bytes_per_s",
    "hashing, one core": "hash_bytes_per_s",
}


def sentences(plan: Plan) -> Iterator[str]:
    """The choice, the runner-up and the notes."""
    compute = plan.compute
    how = [compute.arithmetic, "compiled" if compute.compiles else "eager"]
    how.append("exact" if compute.is_exact else "not exact")
    yield f"compute: {', '.join(how)}: {compute.why}"
    yield f"placement: {_chosen(plan.chosen)}"
    if plan.runner_up is not None:
        yield f"runner-up: {_chosen(plan.runner_up)}"
    yield from (f"note: {note}" for note in plan.notes)


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Estimates beside measurements; what is further off than an estimate may be is marked."""
    cells = tuple(
        (
            row.stage,
            row.what,
            _amount(row, row.planned),
            _amount(row, row.measured),
            f"{row.off:+.0%}",
            "" if row.is_within_tolerance else "beyond tolerance",
        )
        for row in rows
    )
    heads = ("stage", "of", "planned", "measured", "off", "")
    return Table("Plan against measured", heads, cells)


def _amount(row: Comparison, value: float) -> str:
    return format_bytes(int(value)) if row.unit == "B" else format_seconds(value)


def _bound(plan: Plan) -> str:
    """What a step waits for, and how well copies are hidden."""
    step = plan.step
    words = {"compute": "arithmetic", "launching": "launching kernels"}
    said = f"bound by {words.get(step.bound, f'the {step.bound}')}: arithmetic {format_seconds(step.compute_s)}"
    if step.bus_s:
        said += f", bus {format_seconds(step.bus_s)}"
    if step.disk_s:
        said += f", disk and staging {format_seconds(step.disk_s)}"
    return f"{said}; {step.hidden:.0%} of copying hidden" if step.bus_s else said


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _holding(holding: Holding) -> str:
    if not holding.num_streamed:
        return f"{holding.kind}, all {holding.num_blocks}"
    counts = ((len(holding.blocks_in(tier)), tier) for tier in TIERS)
    return f"{holding.kind}, " + ", ".join(f"{count} {tier}" for count, tier in counts if count)


def _chosen(choice: Choice) -> str:
    peak = format_bytes(choice.host_bytes)
    if choice.device_bytes:
        peak = f"{format_bytes(choice.device_bytes)} on the device, {peak} of RAM"
    step = f"{format_seconds(choice.step.seconds)} a step, bound by {choice.step.bound}"
    return f"{_holding(choice.holding)} (peak {peak}; {step}): {choice.why}"
