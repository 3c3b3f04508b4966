"""What a tensor's identity is made of: digests of pieces of whole rows, so that many threads can make it.

A piece is as many rows as fit PIECE_BYTES, at least one; a tensor's digest is that of its dtype, its shape and the
digests of its pieces. The cut follows from the tensor alone, whatever the size of the windows in which it was read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outsize.base.files import json_digest

PIECE_BYTES = 4 * 2**20
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Rows [start, stop) of one of a table's tensors; a whole number of pieces unless it is the last.

    part: of a matrix in 4 bits, the part whose rows they are.
    """

    name: str
    start: int
    stop: int
    row_bytes: int
    part: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes as they lie in the source."""
        return (self.stop - self.start) * self.row_bytes


def rows_per_piece(row_bytes: int) -> int:
    """Rows of one piece."""
    return max(1, PIECE_BYTES // max(1, row_bytes))


def windows_of(
    name: str, num_rows: int, row_bytes: int, slab_bytes: int, part: str = ""
) -> Iterable[RowWindow]:
    """Windows of whole pieces that fit a slab, which holds one piece at least."""
    piece = rows_per_piece(row_bytes)
    step = piece * max(1, slab_bytes // max(1, piece * row_bytes))
    for start in range(0, num_rows, step):
        yield RowWindow(name, start, min(start + step, num_rows), row_bytes, part)


def piece_digests(raw: memoryview, row_bytes: int) -> bytes:
    """Digests of the pieces of a window, one after the other. Hashing leaves Python free for other threads."""
    step = rows_per_piece(row_bytes) * row_bytes
    return b"".join(
        hashlib.sha256(raw[begin : begin + step]).digest() for begin in range(0, len(raw), step)
    )


def tensor_digest(dtype: str, shape: tuple[int, ...], pieces: bytes) -> str:
    """Identity of one tensor, hexadecimal. pieces: the digests of all its pieces in order.

    dtype: also tells the form of a matrix in 4 bits, whose pieces are those of its parts.
    """
    head = json.dumps([dtype, list(shape)], separators=(",", ":")).encode()
    return hashlib.sha256(head + pieces).hexdigest()


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Identity of a model's tensors, from the digest of each by name."""
    return json_digest(sorted(digests.items()))
