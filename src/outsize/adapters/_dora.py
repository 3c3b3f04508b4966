"""DoRA over weights that are packed: each row of W + s BA is divided by its length and multiplied by a learned one, m.

PEFT decodes W and builds W + s BA for every call. Here the lengths come from small products,

    |W + s BA|^2 by rows = |W|^2 + 2 s (W A' * B) summed + s^2 (B A A' * B) summed,

where |W|^2 is known from when the adapter was attached, and W A' is the frozen matrix times `rank` vectors: W is decoded
once more, and nothing else of its size is made. As in the paper (section 4.3) and in PEFT, lengths are constants to the
gradient. With B at zero the factor m / |W| is 1 to the bit, so a fresh adapter is the base.

Dimensions: T tokens, N out_features, K in_features, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_SQUARES = "row_squares"


class PackedDora(DoraLinearVariant):  # type: ignore[misc] # PEFT is not typed
    """PEFT's variant with another way to the same result."""

    @staticmethod
    def forward(
        module: LoraLayer, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any
    ) -> Tensor:
        """What the module gives: result (..., N) is the base's, its bias included."""
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale = module.scaling[active_adapter]
        learned = module.lora_magnitude_vector[active_adapter]
        base = module.get_base_layer()
        lengths_N = row_lengths(
            getattr(learned, _SQUARES), _times(base, down.weight), down.weight, up.weight, scale
        )
        delta = up(down(module.lora_dropout[active_adapter](x))) * scale
        plain = result if base.bias is None else result - base.bias
        # as 1 + a small number: m / |W + s BA| is near 1, where bf16 is coarse
        change_N = (learned.weight / lengths_N - 1).to(result.dtype)
        changed: Tensor = result + delta + change_N * (plain + delta)
        return changed


def use_packed_weights_(layer: LoraLayer, name: str) -> None:
    """Let a layer of PEFT's that was made for DoRA compute it in this way."""
    layer.lora_variant[name] = PackedDora()


def begin_(layer: LoraLayer, name: str, squares_N: Tensor) -> Tensor:
    """Set the learned lengths to those of W's rows, and remember these; the values on the host.

    squares_N: of each row of W, fp32, on the device that computes.
    """
    learned = layer.lora_magnitude_vector[name]
    learned.register_buffer(_SQUARES, squares_N, persistent=False)
    learned.weight = nn.Parameter(squares_N.sqrt())
    began: Tensor = learned.weight.detach().to("cpu", copy=True)
    return began


def reset_(layer: LoraLayer, name: str) -> None:
    """Set the learned lengths to those of W's rows again."""
    learned = layer.lora_magnitude_vector[name]
    learned.weight.copy_(getattr(learned, _SQUARES).sqrt())


def row_lengths(
    squares_N: Tensor, product_rN: Tensor, down_rK: Tensor, up_Nr: Tensor, scale: float
) -> Tensor:
    """|W + s BA| of each row (N), fp32, without a gradient. product_rN: A W'."""
    with torch.no_grad():
        down, up = down_rK.float(), up_Nr.float()
        mixed_N = (product_rN.float().mT * up).sum(dim=1)
        own_N = ((up @ (down @ down.mT)) * up).sum(dim=1)
        # rounding could bring a row that the adapter cancels below zero
        squares = squares_N + 2 * scale * mixed_N + scale**2 * own_N
        return squares.clamp_min(0).sqrt()


def _times(base: Any, down_rK: Tensor) -> Tensor:
    """A W' (r, N), in the type of A; the weight decoded exactly, whatever the arithmetic of products."""
    with torch.no_grad():
        project = getattr(base, "project", None)
        found: Tensor = (
            functional.linear(down_rK, base.weight) if project is None else project(down_rK)
        )
        return found
