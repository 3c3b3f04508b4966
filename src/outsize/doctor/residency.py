"""Do the bytes lie on the card? Four voices that know nothing of each other, and what follows when they differ.

The ledger is what this process believes; the allocator counts what it gave out; the system counts what the process holds on
the card; and the clock measures how fast each piece is read. Drivers move memory to the host without a word when a card is
full, and their counts go on as before: then only the clock tells, which is why it decides when some pieces are slow and
others are not. When all are slow the card itself may be (throttled, or shared), so a second voice is asked for.

Who says nothing is unknown, never well. A device whose memory is the host's has nothing to prove.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.errors import MachineFault
from outsize.base.units import format_bytes
from outsize.devices._ledger import Piece
from outsize.devices._reading import read_seconds

if TYPE_CHECKING:
    from outsize.devices._sensors import SensorReader
    from outsize.devices.protocol import Device

Verdict = Literal["on the card", "off the card", "in doubt", "unknown", "nothing to prove"]

# Below a quarter of its rate memory is elsewhere: over a bus it is read at a tenth of it or less, and a busy or throttled
# card still reaches half.
SHARE = 0.25
# What a launch may take beside the reading: kernels come 10 us apart where the processor is slow, 50 under Windows' driver
# model.
LAUNCH_S = 50e-6
_LARGE_BYTES = 64 << 20  # pieces whose own rate tells what the card can do
_WITHIN = 0.99  # of the ledger's bytes; allocators round
_ALL = 0.9  # of the bytes: then the card is slow, or everything is away
# Another program's turns on the card last 2 ms, in which a piece waits; of so many readings one is not interrupted.
_AGAIN = 8
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Witness:
    """What one voice says."""

    name: Literal["ledger", "allocator", "system", "clock"]
    says: Literal["agrees", "contradicts", "unknown"]
    told: str


@dataclass(frozen=True, slots=True)
class Culprit:
    """A piece that is not where it should be. bytes_per_s: at which it was read; None where torch itself says it is away."""

    owner: str
    name: str
    num_bytes: int
    place: str
    bytes_per_s: float | None = None

    def __str__(self) -> str:
        found = (
            f"lies on {self.place}"
            if self.bytes_per_s is None
            else f"is read at {self.bytes_per_s / 1e9:.3g} GB/s"
        )
        return f"{self.name} ({self.owner}, {format_bytes(self.num_bytes)}) {found}"


@dataclass(frozen=True, slots=True)
class Proof:
    """Where the ledger's pieces lie. rate_bytes_per_s: what the card's memory was expected to do at least."""

    verdict: Verdict
    num_pieces: int
    num_bytes: int
    seconds: float
    rate_bytes_per_s: float
    witnesses: tuple[Witness, ...] = ()
    culprits: tuple[Culprit, ...] = ()

    def __str__(self) -> str:
        what = f"{format_bytes(self.num_bytes)} in {self.num_pieces} pieces"
        told = "; ".join(f"{one.name} {one.says}: {one.told}" for one in self.witnesses)
        if not self.culprits:
            return f"residency: {self.verdict} ({what}): {told}"
        away = format_bytes(sum(one.num_bytes for one in self.culprits))
        named = ", ".join(map(str, self.culprits[:_MOST_NAMED]))
        more = len(self.culprits) - _MOST_NAMED
        named += f" and {more} more" if more > 0 else ""
        return (
            f"residency: {self.verdict}: {away} of {what} are not as the card's own memory is: {named}. Steps that read them "
            f"are many times slower. {told}. {REMEDY}"
        )

    @property
    def is_well(self) -> bool:
        """Whether there is nothing to worry about."""
        return self.verdict in {"on the card", "nothing to prove"}

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        lists = {
            name: [asdict(one) for one in getattr(self, name)] for name in ("witnesses", "culprits")
        }
        return {**asdict(self), **lists, "is_well": self.is_well, "told": str(self)}

    def require(self) -> None:
        """Go on only where nothing is known to be away.

        Raises: MachineFault naming every piece that is.
        """
        if self.verdict == "off the card":
            raise MachineFault(str(self))


REMEDY = (
    "Free memory on the card (other programs, train.batch, the resolution) or let blocks travel with `placement: {kind: "
    "stream}`; on Windows with NVIDIA also set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' for Python"
)


def prove(
    pieces: Sequence[Piece],
    device: Device,
    reader: SensorReader,
    *,
    rate_bytes_per_s: float,
    bus_bytes_per_s: float,
    unlisted_bytes: int = 0,
) -> Proof:
    """Ask all four where the pieces lie.

    rate_bytes_per_s: of the card's memory, as it was measured or is known; bus_bytes_per_s: of the way to the host's.
    unlisted_bytes: that should lie there and that nobody could list; of these nothing can be proved.
    """
    started = time.perf_counter()
    num_bytes = sum(one.num_bytes for one in pieces)
    if not device.has_own_memory:
        told = "the device's memory is the host's"
        only = (Witness("ledger", "unknown", told),)
        return Proof("nothing to prove", len(pieces), num_bytes, 0.0, rate_bytes_per_s, only)
    kind = device.torch_device.type
    here = [one for one in pieces if one.place.type == kind]
    gone = [
        Culprit(one.owner, one.name, one.num_bytes, str(one.place))
        for one in pieces
        if one.place.type != kind
    ]
    timing = _Timing(device, rate_bytes_per_s, bus_bytes_per_s)
    clock, slow = timing.judge(here)
    witnesses = (
        _ledger(len(pieces), len(gone), unlisted_bytes),
        _allocator(device, sum(one.num_bytes for one in here)),
        _system(reader, sum(one.num_bytes for one in here)),
        clock,
    )
    is_whole_card = sum(one.num_bytes for one in slow) >= _ALL * sum(one.num_bytes for one in here)
    verdict = _verdict(witnesses, is_whole_card=is_whole_card)
    seconds = time.perf_counter() - started
    return Proof(verdict, len(pieces), num_bytes, seconds, timing.rate, witnesses, (*gone, *slow))


def _verdict(witnesses: Sequence[Witness], *, is_whole_card: bool) -> Verdict:
    against = {one.name for one in witnesses if one.says == "contradicts"}
    if "ledger" in against or ("clock" in against and not (is_whole_card and len(against) == 1)):
        return "off the card"
    if against:
        return "in doubt"
    is_known = all(one.says == "agrees" for one in witnesses if one.name in {"ledger", "clock"})
    return "on the card" if is_known else "unknown"


def _ledger(num_pieces: int, num_away: int, unlisted_bytes: int) -> Witness:
    if num_away:
        return Witness("ledger", "contradicts", f"{num_away} of {num_pieces} pieces lie elsewhere")
    if unlisted_bytes or not num_pieces:
        told = (
            f"{format_bytes(unlisted_bytes)} are held by a placement that does not name its memory"
        )
        return Witness("ledger", "unknown", told if unlisted_bytes else "nothing is listed")
    return Witness("ledger", "agrees", f"{num_pieces} pieces listed")


def _allocator(device: Device, num_bytes: int) -> Witness:
    given = device.allocated_bytes()
    told = f"{format_bytes(given)} given out, {format_bytes(num_bytes)} listed"
    return Witness("allocator", "agrees" if given >= _WITHIN * num_bytes else "contradicts", told)


def _system(reader: SensorReader, num_bytes: int) -> Witness:
    """The system's count of this process; where it has none, that of the card can only contradict."""
    found = reader.memory()
    if found.card_bytes is not None:
        beside = (
            "" if found.host_bytes is None else f", {format_bytes(found.host_bytes)} in the host's"
        )
        told = f"{found.source}: {format_bytes(found.card_bytes)} in the card's memory{beside}"
        return Witness(
            "system", "agrees" if found.card_bytes >= _WITHIN * num_bytes else "contradicts", told
        )
    whole = reader.sensors()
    if whole.used_bytes is not None and whole.used_bytes < _WITHIN * num_bytes:
        told = f"{whole.source}: all programs together hold {format_bytes(whole.used_bytes)} of the card"
        return Witness("system", "contradicts", told)
    return Witness("system", "unknown", found.why)


@dataclass(slots=True)
class _Timing:
    """Reads every piece, and again those that look slow. rate: of the card's memory, the best that is known; bus: to the host's."""

    device: Device
    rate: float
    bus: float

    def judge(self, pieces: Sequence[Piece]) -> tuple[Witness, list[Culprit]]:
        """What the clock says, and the pieces that are slow."""
        times = self._read(pieces)
        rates = [
            one.num_bytes / max(seconds, 1e-9)
            for one, seconds in zip(pieces, times, strict=True)
            if one.num_bytes >= _LARGE_BYTES
        ]
        self.rate = max([self.rate, *rates])
        slow = self._again(pieces, times)
        told_bytes = sum(one.num_bytes for one in pieces if self._can_tell(one))
        read_bytes = sum(one.num_bytes for one in pieces)
        told = (
            f"{format_bytes(read_bytes)} read in {sum(times) * 1e3:.3g} ms, {format_bytes(read_bytes - told_bytes)} of it in "
            f"pieces too small to tell; the card's memory does {self.rate / 1e9:.4g} GB/s"
        )
        says: Literal["agrees", "unknown"] = "agrees" if told_bytes else "unknown"
        return Witness("clock", "contradicts" if slow else says, told), slow

    def _again(self, pieces: Sequence[Piece], times: Sequence[float]) -> list[Culprit]:
        """Those that stay slow, however often they are read."""
        best = list(times)
        suspects = [
            place for place in range(len(pieces)) if self._is_slow(pieces[place], best[place])
        ]
        for _ in range(_AGAIN):
            if not suspects:
                break
            again = self._read([pieces[place] for place in suspects])
            for place, seconds in zip(suspects, again, strict=True):
                best[place] = min(best[place], seconds)
            suspects = [place for place in suspects if self._is_slow(pieces[place], best[place])]
        found = ((pieces[place], best[place]) for place in suspects)
        return [
            Culprit(one.owner, one.name, one.num_bytes, str(one.place), one.num_bytes / seconds)
            for one, seconds in found
        ]

    def _read(self, pieces: Sequence[Piece]) -> list[float]:
        return read_seconds(self.device, [one.content for one in pieces])

    def _is_slow(self, piece: Piece, seconds: float) -> bool:
        return seconds > self._allowed_s(piece)

    def _can_tell(self, piece: Piece) -> bool:
        """Whether it would be slow if it lay in the host's memory."""
        return self._is_slow(piece, piece.num_bytes / self.bus)

    def _allowed_s(self, piece: Piece) -> float:
        return LAUNCH_S + piece.num_bytes / (SHARE * self.rate)
