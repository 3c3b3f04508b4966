"""Turning the inputs of a matrix so that none stands out: a Hadamard matrix with random signs, in blocks along a row.

x W' = (x R)(W R)' for any orthogonal R. W R has a bell-shaped distribution whatever W has, since each of its numbers is a
sum over a whole block, so that few bits hold it better. R is the same in every block of columns: signs, which follow from a
digest and so are the same everywhere and for ever, then the Hadamard matrix over the root of its size. Sizes are powers of
four, whose roots are powers of two: dividing by them is exact.

Weights are turned by additions in a fixed order, so that every device makes the same bytes; activations by a product with R,
whose entries are exact in every float type. Source: QuaRot, arXiv 2404.00456; ConvRot's blocks of 256.

Dimensions: K columns, B columns of a block, R rows.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

_SIZES = (256, 64, 16)
_SEED = b"outsize: signs of a Hadamard rotation"
_tables: dict[torch.device, dict[int, Tensor]] = {}


def block_size(num_columns: int) -> int:
    """Columns of a block: the largest size of which a row has a whole number.

    num_columns: a multiple of 16.
    """
    return next(size for size in _SIZES if num_columns % size == 0)


def turn_rows(rows_RK: Tensor) -> Tensor:
    """W R of some rows, fp32."""
    blocks, root = _in_blocks(rows_RK)
    return (_transform(blocks * _signs(blocks)) * root).view(rows_RK.shape)


def turn_rows_back(rows_RK: Tensor) -> Tensor:
    """What `turn_rows` was given, fp32, but for rounding."""
    blocks, root = _in_blocks(rows_RK)
    return (_transform(blocks) * root * _signs(blocks)).view(rows_RK.shape)


def turn(x: Tensor) -> Tensor:
    """X R in x's type: (..., K) -> (..., K)."""
    blocks, _ = _in_blocks(x)
    return (blocks @ _table(blocks)).view(x.shape)


def turn_back(grad: Tensor) -> Tensor:
    """The gradient of x from that of x R, in its type."""
    blocks, _ = _in_blocks(grad)
    return (blocks @ _table(blocks).t()).view(grad.shape)


def make_tables(device: torch.device) -> None:
    """Make what `turn` looks up, unless it is there: within a trace it would have no values."""
    if device not in _tables:
        _tables[device] = {size: _matrix(size).to(device) for size in _SIZES}


def _table(blocks: Tensor) -> Tensor:
    make_tables(blocks.device)
    return _tables[blocks.device][blocks.shape[-1]].to(blocks.dtype)


def _in_blocks(rows: Tensor) -> tuple[Tensor, float]:
    size = block_size(rows.shape[-1])
    return rows.reshape(-1, size), float(size**-0.5)


def _transform(blocks: Tensor) -> Tensor:
    """The product with the Hadamard matrix (Sylvester's order), by additions of pairs at growing distances."""
    size, distance = blocks.shape[-1], 1
    while distance < size:
        pairs = blocks.view(-1, size // (2 * distance), 2, distance)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack((left + right, left - right), dim=2)
        distance *= 2
    return blocks.view(-1, size)


@functools.cache
def _bits(size: int) -> tuple[int, ...]:
    raw = hashlib.shake_256(_SEED).digest(size // 8)
    return tuple(byte >> bit & 1 for byte in raw for bit in range(8))


def _signs(blocks: Tensor) -> Tensor:
    """One sign for each column of a block."""
    bits = torch.tensor(_bits(blocks.shape[-1]), dtype=blocks.dtype, device=blocks.device)
    return 1 - 2 * bits


def _matrix(size: int) -> Tensor:
    """R (B, B): every column's unit vector turned."""
    return turn_rows(torch.eye(size))
