"""How fast a machine is: what it did when it was measured, else what its card's datasheet says, else a guess that is named so.

Measured rates lie in this user's cache folder, one entry for each card, system and torch (`outsize bench` writes them).
Whatever was not measured comes from the table of known cards (_cards.toml) times stated shares, or from defaults for an
ordinary desktop. Every rate knows where it is from. No torch is needed. An underscore begins this file's name because
every file without one is a device.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib.metadata
import json
import platform
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.catalogue import nearest
from outsize.base.errors import RecipeError
from outsize.base.files import write_json_atomically

if TYPE_CHECKING:
    from outsize.devices._profile import MachineProfile

FILE_NAME = "rates.json"
TABLE, GUESS = "table", "guess"
# What a card or processor computes in unless asked for something else.
COMPUTE_TYPE = "bf16"

# Shares of a card's memory rate (datasheet): decoding 4-bit weights, whose bytes are read and written once, and work
# element by element. From steps of Flux.2-dev on one H200, as plan/speed.py says.
DECODE_SHARE, ELEMENTWISE_SHARE = 0.45, 0.8
# Flash attention against plain products of the same card, both in bf16: about 390 of 780 TFLOP/s, the same steps.
ATTENTION_SHARE = 0.5

# An ordinary desktop with an NVMe disk.
_HOST = {
    "staging_bytes_per_s": 8e9,  # one thread copying between buffers of DDR4
    "disk_read_bytes_per_s": 2.5e9,  # PCIe 3.0 NVMe, large reads
    "disk_write_bytes_per_s": 1.2e9,  # the same once its cache of fast cells is full
    "first_touch_bytes_per_s": 2.5e9,  # page faults and pinning; 0.85 to 1.3 on the GPU machine of docs/performance.md
    "hash_bytes_per_s": 0.45e9,  # SHA-256 of one core without its instructions
    "import_s": 8.0,  # torch, diffusers, transformers and peft from a warm page cache
}
# A processor, for each core: fp32 products 31 GFLOP/s (256 x 3072 x 3072 there and back 0.155 s on two cores of an AMD
# EPYC), decoding 4.5 bytes a weight at 0.9 ns (docs/LOG.md), a share of the memory's rate.
_CORE = {"matmul": 31e9, "decode": 5e9, "memory": 8e9}
# A card nobody told of: an entry card of 2021, in a slot of PCIe 4.0 with sixteen lanes.
_UNKNOWN = {"matmul": 25e12, "memory": 300e9, "bus": 25e9}
_OF_CARD = [
    "matmul_flops",
    "attention_flops",
    "decode_bytes_per_s",
    "device_memory_bytes_per_s",
    "bus_bytes_per_s",
]
# Words of a card's name that do not tell cards apart.
_NOISE = re.compile(
    r"nvidia|geforce|amd|radeon|graphics|rtx|rx|pro|ai|generation|edition|workstation|server|\d+gb|hbm\w*|sxm\d*|gpu"
)


@dataclass(frozen=True, slots=True)
class Card:
    """One row of the table: what the datasheet says. matmul: dense FLOP/s by arithmetic. pcie: generation and lanes."""

    name: str
    vendor: str
    vram_bytes: int
    matmul: Mapping[str, float]
    memory_bytes_per_s: float
    pcie: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one machine achieves. matmul_flops: products by arithmetic; one that is missing cannot be done.

    decode_bytes_per_s: bytes of a weight read and written while it is decoded. bus: from pinned memory to the card.
    staging: from ordinary to pinned memory. first_touch: of fresh host memory. hash: of one core. import_s: of the
    libraries. origins: by field, "measured DATE", "table", "guess" or "stated".
    """

    matmul_flops: Mapping[str, float]
    attention_flops: float
    decode_bytes_per_s: float
    device_memory_bytes_per_s: float
    bus_bytes_per_s: float
    staging_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    first_touch_bytes_per_s: float
    hash_bytes_per_s: float
    import_s: float
    num_cores: int
    origins: Mapping[str, str]

    def origin(self, field: str) -> str:
        """Where a rate comes from."""
        return self.origins.get(field, GUESS)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "matmul_flops": dict(self.matmul_flops)}


RATE_NAMES = frozenset(one.name for one in fields(Rates)) - {"origins", "num_cores"}


def rates_of(machine: MachineProfile, *, folder: Path | None = None) -> Rates:
    """The best that is known of a machine. folder: where measured rates lie; None: nothing measured is looked for."""
    rates = _estimated(machine)
    return rates if folder is None else _with_saved(rates, folder, machine.device, machine.os)


def stated_rates(rates: Rates, **values: float) -> Rates:
    """The same with some rates stated by a person: disk_read_bytes_per_s=3e9."""
    assert values.keys() <= RATE_NAMES, values.keys() - RATE_NAMES
    origins = {**rates.origins, **dict.fromkeys(values, "stated")}
    return replace(rates, **values, origins=origins)  # type: ignore[arg-type] # names checked above


def save_rates(folder: Path, device: str, values: Mapping[str, Any]) -> None:
    """Keep what was measured on this machine with this card, beside and over what was measured before.

    values: by field of Rates; matmul_flops a mapping, of which only what was measured.
    """
    assert values.keys() <= RATE_NAMES, values.keys() - RATE_NAMES
    saved = _read(folder)
    entry = saved.setdefault(_key(device, platform.system()), {})
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    entry.update({name: {"value": value, "date": today} for name, value in values.items()})
    write_json_atomically(folder / FILE_NAME, saved)


def rates_folder() -> Path:
    """This user's cache folder, where measured rates lie."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("outsize", appauthor=False))


def find_card(name: str) -> Card | None:
    """The card of that name in the table, however its maker or its tool writes it; None when there is none."""
    wanted = _words(name)
    exact = [card for card in cards() if card.name.lower() == name.strip().lower()]
    alike = exact or [card for card in cards() if _words(card.name) == wanted]
    alike = alike or [card for card in cards() if _words(card.name) == wanted - {"pcie"}]
    if not wanted or not alike:
        return None
    size = re.search(r"(\d+)\s?gb", name.lower())
    of_size = [card for card in alike if size and card.vram_bytes == int(size[1]) << 30]
    return (of_size or alike)[-1]


def require_card(name: str) -> Card:
    """The card of that name.

    Raises: RecipeError with the nearest names when the table has none.
    """
    card = find_card(name)
    if card is None:
        hint = nearest(name, [one.name for one in cards()])
        raise RecipeError(f"no card is known by the name {name!r}; {hint}")
    return card


def vendor_of(name: str) -> str:
    """Who makes a card, as far as its name tells: "nvidia", "amd" or ""."""
    card = find_card(name)
    if card is not None:
        return card.vendor
    lowered = name.lower()
    makers = {"nvidia": ("nvidia", "geforce", "rtx"), "amd": ("amd", "radeon")}
    return next(
        (maker for maker, words in makers.items() if any(word in lowered for word in words)), ""
    )


def operand_bytes(arithmetic: str) -> int:
    """Bytes of one decoded number in an arithmetic of its own; 2 in the type that cards compute in."""
    return int(_table()["arithmetic"].get(arithmetic, {}).get("operand_bytes", 2))


def arithmetics() -> tuple[str, ...]:
    """Arithmetics that need hardware of their own."""
    return tuple(_table()["arithmetic"])


def first_capability(arithmetic: str) -> float | None:
    """The CUDA capability from which on cards have an arithmetic."""
    found = _table()["arithmetic"].get(arithmetic, {}).get("capability")
    return None if found is None else float(found)


@functools.cache
def cards() -> tuple[Card, ...]:
    """All known cards."""
    return tuple(
        Card(
            name=row["name"],
            vendor=row["vendor"],
            vram_bytes=row["vram_gib"] << 30,
            matmul={
                name: row[name] * 1e12
                for name in (COMPUTE_TYPE, *_table()["arithmetic"])
                if name in row
            },
            memory_bytes_per_s=row["memory_gb_per_s"] * 1e9,
            pcie=(row["pcie"][0], row["pcie"][1]),
        )
        for row in _table()["card"]
    )


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("outsize.devices").joinpath("_cards.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _words(name: str) -> frozenset[str]:
    """What is left of a name when all that does not tell cards apart is gone."""
    found = re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower())
    return frozenset(word for word in found if not _NOISE.fullmatch(word))


def _estimated(machine: MachineProfile) -> Rates:
    """From the table or by guess."""
    card = find_card(machine.device) if machine.has_gpu else None
    if not machine.has_gpu:
        origin, matmul = GUESS, {COMPUTE_TYPE: _CORE["matmul"] * machine.num_cores}
        memory = _CORE["memory"] * machine.num_cores
        decode, bus = _CORE["decode"] * machine.num_cores, _HOST["staging_bytes_per_s"]
        attention, elementwise = matmul[COMPUTE_TYPE] * ATTENTION_SHARE, memory
    else:
        origin = GUESS if card is None else TABLE
        matmul = _guessed_matmul(machine) if card is None else _achieved(card)
        memory = _UNKNOWN["memory"] if card is None else card.memory_bytes_per_s
        bus = _UNKNOWN["bus"] if card is None else _bus(card)
        decode, elementwise = memory * DECODE_SHARE, memory * ELEMENTWISE_SHARE
        attention = matmul[COMPUTE_TYPE] * ATTENTION_SHARE
    return Rates(
        matmul_flops=matmul,
        attention_flops=attention,
        decode_bytes_per_s=decode,
        device_memory_bytes_per_s=elementwise,
        bus_bytes_per_s=bus,
        num_cores=machine.num_cores,
        origins=dict.fromkeys(_OF_CARD, origin),
        **_HOST,
    )


def _achieved(card: Card) -> dict[str, float]:
    shares = _table()["shares"][card.vendor]
    return {name: flops * shares.get(name, shares["matmul"]) for name, flops in card.matmul.items()}


def _guessed_matmul(machine: MachineProfile) -> dict[str, float]:
    """Of a card that the table lacks; twice as much in 8 bits where its capability says that it has them."""
    matmul = {COMPUTE_TYPE: _UNKNOWN["matmul"]}
    for name in arithmetics():
        first = first_capability(name)
        if first is not None and (machine.compute_capability or 0) >= first:
            matmul[name] = 2 / operand_bytes(name) * _UNKNOWN["matmul"]
    return matmul


def _bus(card: Card) -> float:
    generation, lanes = card.pcie
    return float(_table()["pcie"][str(generation)]) * lanes / 16


def _with_saved(rates: Rates, folder: Path, device: str, system: str) -> Rates:
    """The same with what was measured on this card in its place."""
    entry = _read(folder).get(_key(device, system), {})
    values = {name: one["value"] for name, one in entry.items() if name in RATE_NAMES}
    origins = {name: f"measured {one['date']}" for name, one in entry.items() if name in RATE_NAMES}
    if "matmul_flops" in values:
        values["matmul_flops"] = {**rates.matmul_flops, **values["matmul_flops"]}
    return replace(rates, **values, origins={**rates.origins, **origins})


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """All that was measured; nothing when the file is not there or not readable, for losing it costs a plan only words."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(device: str, system: str) -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"{device}, {system}, torch {torch}"
