"""The pure schedule: what step n trains on is a function of (seed, n, place) and nothing else.

Nothing is replayed and no generator has a state, so resuming needs no loader state, and any
micro-batch can be asked for in any order at the same price.

How a micro-batch is found, from the outside in:
1. Micro-batches are numbered n = step * accumulate + place. Where all pictures are of one bucket,
   a micro-batch is made of `batch` draws of one picture each, so that sets mix in it; elsewhere it
   is one draw, all of one set, since its pictures must share a size. A comparison of whole numbers
   says which set a draw goes to and how many that set had before: sets keep their shares at every
   moment to within a draw or two, not only on average.
2. In each bucket of a set, pictures form an endless stream: all of them in hashed order, then all
   again in another. The bucket's m-th draw is the m-th run of pictures in it. Where a draw's length
   does not divide the bucket, it reaches over into the next round; a bucket with fewer pictures
   than a draw holds some of them several times in one, with different noise, and comes up as much
   less often. So no picture is favoured by its size.
3. An epoch of a set is every draw that begins in that round of its bucket, in hashed order. After E
   epochs every picture was seen at least E times; with draws of one picture, or where a draw's
   length divides the buckets, exactly E times.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from outsize.base.errors import RecipeError
from outsize.data.buckets import Bucket

_SEED_BITS = 63  # torch.Generator.manual_seed takes a signed 64-bit number


@dataclass(frozen=True, slots=True)
class Entry:
    """What the schedule knows of a picture at one resolution; its index is its place in the schedule's entries.

    A picture that is to count twice is two entries.
    """

    set_index: int
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Item:
    """One sample: which entry, whether its caption is dropped, the seed of its noise, and whether it is mirrored.

    set_index: the picture's set. epoch: of that set, from 0. noise_seed: 63 bits. The low 32 bits alone differ, too, between the first 2**32 samples of a
    run: torch's CPU generator looks at no others.
    """

    picture: int
    drops_caption: bool
    noise_seed: int
    set_index: int
    epoch: int
    is_flipped: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one bucket."""

    items: tuple[Item, ...]
    bucket: Bucket


class Schedule:
    """Micro-batches by (step, place)."""

    def __init__(
        self,
        seed: int,
        entries: Sequence[Entry],
        *,
        batch: int = 1,
        accumulate: int = 1,
        caption_dropout: float = 0.0,
        shares: Sequence[float | None] = (),
        flips: Sequence[float] = (),
        held_out: Collection[int] = (),
    ) -> None:
        """Make a schedule; it is cheap, and any two made alike are equal. held_out: places of entries that are never drawn.

        flips: for each set the share of its samples that are mirrored; () is none. shares: for each set its share of samples, None for the sets that divide the rest by
        number of pictures; () is None for all.
        Raises: RecipeError when shares are not in 0..1, leave nothing or too much, or belong to a
        set without pictures.
        """
        assert batch >= 1, "a micro-batch has at least one sample"
        assert accumulate >= 1, "a step has at least one micro-batch"
        assert 0 <= caption_dropout <= 1, "caption dropout is a probability"
        self.seed = seed
        self.batch = batch
        self.accumulate = accumulate
        self._dropout_bound = round(caption_dropout * 2**53)
        self._flip_bounds = {index: round(share * 2**53) for index, share in enumerate(flips)}
        by_set: dict[int, dict[Bucket, list[int]]] = defaultdict(lambda: defaultdict(list))
        drawn = {index: one for index, one in enumerate(entries) if index not in set(held_out)}
        for index, entry in drawn.items():
            by_set[entry.set_index][entry.bucket].append(index)
        counts = {
            set_index: sum(map(len, buckets.values())) for set_index, buckets in by_set.items()
        }
        self.shares = exact_shares(shares, counts)
        num_buckets = len({entry.bucket for entry in drawn.values()})
        self._draws = batch if num_buckets == 1 else 1  # of a micro-batch
        self._streams = {
            set_index: _Streams(seed, set_index, batch // self._draws, by_set[set_index])
            for set_index in sorted(by_set)
        }

    def micro_batch(self, step: int, place: int) -> MicroBatch:
        """The samples of micro-batch `place` (below `accumulate`) of a step, counted from 0."""
        assert step >= 0, "steps are counted from 0"
        assert 0 <= place < self.accumulate, "a place is below the number accumulated"
        number = step * self.accumulate + place
        items: list[Item] = []
        for draw in range(number * self._draws, (number + 1) * self._draws):
            set_index, ordinal = draw_set(self.shares, draw)
            epoch, bucket, pictures = self._streams[set_index].draw(ordinal)
            for picture in pictures:
                sample = number * self.batch + len(items)
                drops = _hash(self.seed, "caption", sample) >> 11 < self._dropout_bound
                flips = _hash(self.seed, "flip", sample) >> 11 < self._flip_bounds.get(set_index, 0)
                seed = noise_seed(self.seed, sample)
                items.append(Item(picture, drops, seed, set_index, epoch, flips))
        return MicroBatch(tuple(items), bucket)


def exact_shares(
    shares: Sequence[float | None], counts: dict[int, int]
) -> tuple[tuple[int, Fraction], ...]:
    """(set index, share) of each set that is drawn from; shares add up to exactly 1.

    counts: number of pictures by set. Shares are read as the decimals people write: 0.3 is 3/10.
    Raises: RecipeError as Schedule does.
    """
    if not counts:
        raise RecipeError("there is no picture to train on")
    stated = {
        index: Fraction(str(share)) for index, share in enumerate(shares) if share is not None
    }
    for index, share in stated.items():
        if not 0 < share <= 1:
            raise RecipeError(f"set {index} has a share of {float(share)}; it must be in 0..1")
        if index not in counts:
            raise RecipeError(f"set {index} has a share of {float(share)} but no pictures")
    total = sum(stated.values(), Fraction(0))
    rest = {index: count for index, count in counts.items() if index not in stated}
    if rest and total >= 1:
        raise RecipeError(
            f"the stated shares add up to {float(total)}, which leaves nothing to "
            f"{len(rest)} sets without one; lower them"
        )
    if not rest and abs(total - 1) > Fraction(1, 1000):  # thirds written as 0.333 are meant
        raise RecipeError(f"the shares add up to {float(total)}; they must add up to 1")
    if not rest:
        return tuple((index, stated[index] / total) for index in sorted(stated))
    num_rest = sum(rest.values())
    return tuple(
        (index, stated.get(index) or (1 - total) * Fraction(counts[index], num_rest))
        for index in sorted(counts)
    )


def draw_set(shares: Sequence[tuple[int, Fraction]], number: int) -> tuple[int, int]:
    """Which set draw `number` goes to, and how many it had before.

    The first set takes number n where floor(n * share + 1/2) is about to rise, which spreads it
    evenly; what it leaves is numbered anew and divided among the others in the same way.
    """
    left = Fraction(1)
    for index, share in shares[:-1]:
        part = share / left
        before = (2 * number * part.numerator + part.denominator) // (2 * part.denominator)
        after = (2 * (number + 1) * part.numerator + part.denominator) // (2 * part.denominator)
        if after > before:
            return index, before
        number -= before
        left -= share
    return shares[-1][0], number


def noise_seed(seed: int, sample: int) -> int:
    """A 63-bit seed for sample number `sample`: 31 hashed bits above 32 permuted ones.

    The lower half is a permutation of the sample's number (xors, odd factors and shifts can each
    be undone), so that no two samples of a run share it before 2**32 of them.
    """
    keys = _hash(seed, "noise")
    low = (sample ^ keys) & 0xFFFFFFFF
    # Factors and shifts of the 32-bit finaliser of MurmurHash3, with the run's keys between.
    low = ((low ^ (low >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    low ^= keys >> 32
    low = ((low ^ (low >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    low ^= low >> 16
    high = _hash(seed, "noise", sample) >> (64 - (_SEED_BITS - 32))
    return high << 32 | low


class _Streams:
    """The draws of one set, by ordinal."""

    def __init__(
        self, seed: int, set_index: int, batch: int, buckets: dict[Bucket, list[int]]
    ) -> None:
        self._seed = seed
        self._set_index = set_index
        self._batch = batch
        self._buckets = tuple(sorted(buckets))
        self._pictures = tuple(tuple(buckets[bucket]) for bucket in self._buckets)
        self._num_pictures = sum(map(len, self._pictures))
        # Two epochs are in use where a draw reaches over; a few more for other readers.
        self._plan = functools.lru_cache(maxsize=4)(self._make_plan)
        self._round = functools.lru_cache(maxsize=4 * len(self._buckets))(self._make_round)

    def draw(self, ordinal: int) -> tuple[int, Bucket, list[int]]:
        """Epoch, bucket and picture indices of the set's draw number `ordinal`."""
        epoch = self._epoch_of(ordinal)
        which, run = self._plan(epoch)[ordinal - self._begin_of(epoch)]
        pictures = self._pictures[which]
        chosen = []
        for position in range(run * self._batch, (run + 1) * self._batch):
            in_round, place = divmod(position, len(pictures))
            chosen.append(pictures[self._round(which, in_round)[place]])
        return epoch, self._buckets[which], chosen

    def _begin_of(self, epoch: int) -> int:
        """How many draws come before an epoch: those begun in earlier rounds."""
        return sum(-(-epoch * len(pictures) // self._batch) for pictures in self._pictures)

    def _epoch_of(self, ordinal: int) -> int:
        """The epoch that holds a draw, by bisection between bounds of _begin_of.

        epoch * num_pictures / batch <= begin <= that + number of buckets.
        """
        low = max(0, (ordinal - len(self._buckets)) * self._batch // self._num_pictures - 1)
        high = ordinal * self._batch // self._num_pictures + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._begin_of(middle) <= ordinal:
                low = middle
            else:
                high = middle
        return low

    def _make_plan(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """(bucket, run) of each draw of an epoch, in hashed order."""
        runs = [
            (which, run)
            for which, pictures in enumerate(self._pictures)
            for run in range(
                -(-epoch * len(pictures) // self._batch),
                -(-(epoch + 1) * len(pictures) // self._batch),
            )
        ]
        return tuple(
            sorted(runs, key=lambda run: (_hash(self._seed, "run", self._set_index, *run), run))
        )

    def _make_round(self, which: int, number: int) -> tuple[int, ...]:
        """The order of a bucket's pictures in a round."""
        key = (self._seed, "round", self._set_index, which, number)
        return tuple(
            sorted(range(len(self._pictures[which])), key=lambda place: (_hash(*key, place), place))
        )


def _hash(*parts: int | str) -> int:
    """64 bits that look random, the same on every machine and in every Python."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
