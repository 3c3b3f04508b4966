"""absmax8: one byte a weight and one scale a row; a format dropped in by test_dropin.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.parts import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Encoder


@dataclass(frozen=True, slots=True)
class AbsMax8:
    """Rows are scaled so that their largest weight becomes `levels`."""

    levels: Literal[127, 63] = 127

    def describe(self) -> dict[str, Any]:
        """Name, options and code version."""
        return {"name": "absmax8", **asdict(self), "code_version": 1}

    def kernel(self, device: torch.device) -> str:  # noqa: ARG002 - the same everywhere
        return "torch"

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Every matrix."""
        return len(shape) == 2

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Codes (N, K) and scales (N,)."""
        return Part("codes", "I8", shape), Part("scales", "F32", shape[:1])

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder of rows, each by itself."""
        import torch

        levels = self.levels

        class Rows:
            def __init__(self) -> None:
                self.codes: list[Tensor] = []
                self.scales: list[Tensor] = []

            def push(self, rows_NK: Tensor) -> None:
                rows = rows_NK.float()
                scales = rows.abs().amax(dim=1).clamp_min(1e-12) / levels
                self.codes.append((rows / scales[:, None]).round().to(torch.int8))
                self.scales.append(scales)

            def finish(self) -> dict[str, Tensor]:
                codes = torch.cat(self.codes)
                assert codes.shape == shape
                return {"codes": codes, "scales": torch.cat(self.scales)}

        return Rows()

    def decode(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Codes times scales, rounded once."""
        return (parts["codes"].view(shape).float() * parts["scales"].view(-1, 1)).to(dtype)


plugin = AbsMax8
