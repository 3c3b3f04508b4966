"""How much a format loses on a matrix, and what the matrix then weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.formats.protocol import Format


@dataclass(frozen=True, slots=True)
class Accuracy:
    """relative_error: Frobenius norm of the difference by that of the matrix (0 where both are 0)."""

    relative_error: float
    max_abs_error: float
    bits_per_weight: float

    @property
    def snr_db(self) -> float:
        """Signal to noise, in decibels; infinite where nothing was lost."""
        return math.inf if self.relative_error == 0 else -20 * math.log10(self.relative_error)


def measure(fmt: Format, matrix: Tensor) -> Accuracy:
    """Encode a tensor, decode it in fp32 and compare in fp64.

    Memory: 4 bytes per weight for the decoded tensor and 24 for the comparison, on the tensor's device.
    Raises: FormatError when the format cannot hold it.
    """
    import torch

    shape = tuple(matrix.shape)
    encoder = fmt.encoder(shape)
    encoder.push(matrix)
    exact = matrix.double()
    difference = fmt.decode(encoder.finish(), shape, torch.float32).double() - exact
    noise, signal = float(difference.square().sum()), float(exact.square().sum())
    num_bytes = sum(part.num_bytes for part in fmt.parts(shape))
    return Accuracy(
        relative_error=math.sqrt(noise / signal) if signal else (math.inf if noise else 0.0),
        max_abs_error=float(difference.abs().max()),
        bits_per_weight=8 * num_bytes / matrix.numel(),
    )


def heavy_tailed(num_rows: int, num_columns: int, seed: int, *, outliers: int = 0) -> Tensor:
    """Weights of Student's t with four degrees of freedom, whose tails are as heavy as trained matrices' at their worst.

    outliers: columns, evenly spaced, that are eight times as large.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(5, num_rows, num_columns, generator=generator)
    drawn = 0.02 * normal[0] / (normal[1:].square().sum(0) / 4).sqrt()
    for number in range(outliers):
        drawn[:, (2 * number + 1) * num_columns // (2 * outliers)] *= 8
    return drawn
