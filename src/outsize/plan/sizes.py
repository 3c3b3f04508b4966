"""What one model weighs, from its shape table and a format: bytes on disk, in a packet, and while it runs.

The rules are those of the store and of FrozenModel: linears inside blocks are packed where the format can hold them;
everything else is stored plainly and lies on the device in the compute type.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outsize.base.parts import DTYPE_BYTES
from outsize.base.table import ShapeTable, TensorSpec
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import assign
from outsize.formats.protocol import Format, make_format
from outsize.recipes.adapter import AdapterChoice
from outsize.recipes.recipe import FormatChoice
from outsize.weights.packet import plan_packet

_PUBLISHED = "BF16"  # checkpoints of models of this size are published in it


@dataclass(frozen=True, slots=True)
class Found:
    """What the files of a source in few bits tell. source_bytes: that are read. adopted: its matrices in 4 bits, if any."""

    source_bytes: int
    adopted: frozenset[str]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """One block of a model.

    streamed_bytes: its packed linears. width: of its hidden stream. traffic: numbers that enter and leave its linears for
    one token. matrix_elements: numbers of its packed matrices; token_elements: of those that one token passes.
    widest_input: columns of its widest matrix.
    """

    streamed_bytes: int
    packet_bytes: int
    width: int
    traffic: int
    matrix_elements: int
    token_elements: int
    num_linears: int
    widest_input: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """One model in one format.

    small_elements: numbers that are not packed and stay on the device. largest_matrix: numbers of the largest packed
    matrix, which is decoded for a product. largest_parts_bytes: of one matrix as stored. first_channels: of its first
    convolution, 0 without one. num_adopted: matrices that its files hold in 4 bits; num_beside: linears that these keep plain.
    """

    blocks: tuple[BlockSizes, ...]
    small_elements: int
    largest_matrix: int
    largest_parts_bytes: int
    store_bytes: int
    source_bytes: int
    first_channels: int
    num_adopted: int = 0
    num_beside: int = 0

    @property
    def packed_bytes(self) -> int:
        """All blocks' packed linears."""
        return sum(block.streamed_bytes for block in self.blocks)

    @property
    def largest_packet_bytes(self) -> int:
        """The largest unit that is read or written at once."""
        return max((block.packet_bytes for block in self.blocks), default=self.store_bytes)


def model_sizes(
    family: str,
    variant: str,
    packed: FormatChoice,
    rest: FormatChoice,
    found: Found | None = None,
) -> ModelSizes:
    """Sizes of a family's variant, its linears in blocks in one format and all else in another; no torch.

    found: of a source that holds matrices in 4 bits, which then are the packed ones.
    Raises: RecipeError for names or options that do not exist.
    """
    choices = (one.model_dump_json() for one in (packed, rest))
    return _cached_sizes(family, variant, *choices, found=found)


def vocabulary_tensors(family: str, variant: str) -> tuple[str, ...]:
    """Token table and head of a language base, which a step reads a few rows or tiles of; () for others."""
    found = FAMILIES.load(family)
    size = found.vocabulary(variant) if hasattr(found, "vocabulary") else 0
    return tuple(
        spec.name
        for spec in found.table(variant)
        if spec.block is None and len(spec.shape) == 2 and spec.shape[0] == size
    )


def adapter_elements(table: ShapeTable, choice: AdapterChoice) -> tuple[tuple[int, int], ...]:
    """(block, numbers) of every trained tensor: rank x inputs and outputs x rank for each adapted linear, magnitudes too.

    Raises: RecipeError when nothing would be trained.
    """
    ranks = choice.adapted(table)
    adapted = [spec for spec in table.linears(choice.roles) if spec.module in ranks]
    pairs = [(spec.block or 0, ranks[spec.module][0] * n) for spec in adapted for n in spec.shape]
    lengths = [(spec.block or 0, spec.shape[0]) for spec in adapted]
    return tuple(pairs + lengths if choice.kind == "dora" else pairs)


@functools.lru_cache(maxsize=64)
def _cached_sizes(
    family: str, variant: str, packed: str, rest: str, *, found: Found | None
) -> ModelSizes:
    choices = (FormatChoice.model_validate_json(one) for one in (packed, rest))
    fmt, plain = (make_format(one.name, one.options) for one in choices)
    return sizes_of(FAMILIES.load(family).table(variant), fmt, plain, found)


def sizes_of(
    table: ShapeTable, fmt: Format, plain: Format, found: Found | None = None
) -> ModelSizes:
    """Sizes of a table whose packed matrices are held in `fmt` and the rest in `plain`; found: as in `model_sizes`."""
    packing = whole = assign(table, fmt, plain)
    if found is not None and found.adopted:
        packing = whole.beside(found.adopted, "")
    grouped: dict[int | None, list[TensorSpec]] = {None: []}
    for spec in table:
        grouped.setdefault(spec.block, []).append(spec)
    packets = {
        block: plan_packet(specs, {spec.name: packing.parts(spec.name) for spec in specs})
        for block, specs in grouped.items()
    }
    packed = [spec for spec in table if _is_packed(spec)]
    convolutions = (spec.shape[0] for spec in table if spec.role == "conv" and len(spec.shape) == 4)
    return ModelSizes(
        blocks=tuple(
            _block_sizes(packets[block].streamed_bytes, packets[block].num_bytes, grouped[block])
            for block in range(table.num_blocks)
        ),
        small_elements=sum(spec.num_elements for spec in table if not _is_packed(spec)),
        largest_matrix=max((spec.num_elements for spec in packed), default=0),
        largest_parts_bytes=max(
            (sum(part.num_bytes for part in packing.parts(spec.name)) for spec in packed), default=0
        ),
        store_bytes=sum(packet.num_bytes for packet in packets.values()),
        source_bytes=sum(spec.num_elements for spec in table) * DTYPE_BYTES[_PUBLISHED]
        if found is None
        else found.source_bytes,
        first_channels=next(convolutions, 0),
        num_adopted=0 if found is None else len(found.adopted),
        num_beside=len(packing.left_plain) - len(whole.left_plain),
    )


def _block_sizes(streamed_bytes: int, packet_bytes: int, specs: Sequence[TensorSpec]) -> BlockSizes:
    linears = [spec for spec in specs if _is_packed(spec)]
    elements = sum(spec.num_elements for spec in linears)
    return BlockSizes(
        streamed_bytes=streamed_bytes,
        packet_bytes=packet_bytes,
        width=stream_width(specs),
        traffic=token_traffic(specs),
        matrix_elements=elements,
        token_elements=elements // num_streams(specs),
        num_linears=len(linears),
        widest_input=max((spec.shape[1] for spec in linears), default=0),
    )


def stream_width(specs: Iterable[TensorSpec]) -> int:
    """Width of the hidden stream that runs through a block: the size most of its linears begin or end with.

    Every attention and feed-forward matrix reads from the stream or writes to it, so the stream's width is the commonest
    of their dimensions, grouped-query keys and fused projections notwithstanding.
    """
    seen = Counter(size for spec in specs if spec.is_linear for size in spec.shape)
    return max(seen, key=lambda size: (seen[size], size)) if seen else 0


def num_streams(specs: Iterable[TensorSpec]) -> int:
    """How many streams run side by side through a block.

    A block in which every shape of matrix occurs twice runs two (text and image, with weights of their own), and a token
    passes only one of them.
    """
    return math.gcd(*Counter(spec.shape for spec in specs if spec.is_linear).values()) or 1


def token_traffic(specs: Sequence[TensorSpec]) -> int:
    """Numbers that enter and leave a block's linears for one token."""
    return sum(sum(spec.shape) for spec in specs if spec.is_linear) // num_streams(specs)


def _is_packed(spec: TensorSpec) -> bool:
    return spec.is_linear and spec.block is not None
