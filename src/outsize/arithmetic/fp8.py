"""Products in 8-bit floats (e4m3) on cards whose matrix units take them: Ada, Hopper, Blackwell.

The weight goes from its few bits straight to e4m3 where its format can, else by way of the compute type; it is scaled per row of the operand: per output for the forward product, per
input for the gradient's. Activations and gradients are scaled per row (per token) just before their product. Both sums
accumulate in the matrix unit and leave it in the compute type. A row that is not finite stays so, and training stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.arithmetic.protocol import FrozenMatrix, Parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MULTIPLE = 16  # what the matrix units want of N and K
_LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 1e-12  # a row of zeros
_ALLOWED_ERROR = 0.06  # e4m3 has 3 bits of mantissa: two operands each off by at most 1/16, 0.037 seen on random ones
_FIRST_CAPABILITY = (8, 9)
_faults: dict[tuple[str, int | None], str | None] = {}


class Fp8:
    """The plug-in."""

    def fault(self, device: torch.device) -> str | None:
        key = (device.type, device.index)
        if key not in _faults:
            _faults[key] = _find_fault(device)
        return _faults[key]

    def supports(self, shape: tuple[int, int]) -> bool:
        return all(size % MULTIPLE == 0 for size in shape)

    def prepare(self, matrix: FrozenMatrix, parts: Parts) -> Parts:
        return matrix.e4m3_scales(parts) or ()

    def multiply(
        self,
        x: Tensor,
        matrix: FrozenMatrix,
        parts: Parts,
        prepared: Parts,
        bias: Tensor | None,
    ) -> Tensor:
        if prepared:
            scale_N1 = prepared[0]
            weight_NK = matrix.decode_e4m3(parts, scale_N1, is_transposed=False)
        else:
            weight_NK, scale_N1 = quantise_rows(matrix.decode(parts, x.dtype))
        return _product(x, weight_NK, scale_N1, bias)

    def multiply_transposed(
        self, grad: Tensor, matrix: FrozenMatrix, parts: Parts, prepared: Parts
    ) -> Tensor:
        if prepared:
            scale_K1 = prepared[1]
            weight_KN = matrix.decode_e4m3(parts, scale_K1, is_transposed=True)
        else:
            weight_KN, scale_K1 = quantise_rows(matrix.decode(parts, grad.dtype).t().contiguous())
        return _product(grad, weight_KN, scale_K1, None)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3 and their scales: x (..., K) -> (R, K) and (R, 1) fp32."""
    import torch

    flat_RK = x.reshape(-1, x.shape[-1])
    scale_R1 = flat_RK.abs().amax(1, keepdim=True).float().clamp_min(_SMALLEST_SCALE) / _LARGEST
    return (flat_RK.float() / scale_R1).to(torch.float8_e4m3fn), scale_R1


def _product(x: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias: Tensor | None) -> Tensor:
    import torch

    x_RK, scale_R1 = quantise_rows(x)
    y_RN: Tensor = torch._scaled_mm(  # noqa: SLF001 - the name under which torch 2.6 to 2.13 have it
        x_RK,
        weight_NK.t(),
        scale_a=scale_R1,
        scale_b=scale_N1.view(1, -1),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return y_RN.view(*x.shape[:-1], weight_NK.shape[0])


def _find_fault(device: torch.device) -> str | None:
    """What a small product says; the reference is fp32's."""
    import torch

    if device.type == "cpu":
        return "processors have no 8-bit floats"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _FIRST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no e4m3 units (they came with Ada, capability 8.9)"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 128, generator=generator).to(device) for _ in range(2))
    try:
        weight_e4m3, scale = quantise_rows(weight)
        found = _product(x.bfloat16(), weight_e4m3, scale, None).float()
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} refused an e4m3 product: {' '.join(str(error).split())[:200]}"
    wanted = x @ weight.t()
    off = float((found - wanted).norm() / wanted.norm())
    return None if off < _ALLOWED_ERROR else f"an e4m3 product was off by {off:.2%} there"


plugin = Fp8()
