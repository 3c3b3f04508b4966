"""What runs in a child of doctor: each measures one thing on the device and gives plain numbers; checks.py judges them.

Truth is float64 on the processor, of the same rounded inputs. kind: of the device; None for the best one present.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from outsize.devices._host import HostBuffer
from outsize.devices.protocol import Device, card_of, open_device
from outsize.formats.protocol import make_format
from outsize.layers.frozen import FrozenLinear
from outsize.recipes.recipe import BaseChoice

MIB = 2**20
_PIECES = 16
# Of what is called free: beyond it a desktop begins to swap, and some drivers hang rather than refuse.
ALLOCATED_SHARE = 0.75
_HOST_BYTES = 512 * MIB
_PINNED_STEP, _PINNED_MOST = 256 * MIB, 4096 * MIB


def card(kind: str | None) -> dict[str, Any]:
    """Which card would be opened; opens no context on it and waits for nobody."""
    found, name = card_of(kind)
    return {"card": None if found is None else asdict(found), "name": name}


def device(kind: str | None) -> dict[str, Any]:
    """Which device opens, and whether torch was built for it."""
    opened = open_device(kind)
    found: dict[str, Any] = {
        "kind": opened.kind,
        "name": opened.name,
        **_computes_in(opened),
        "is_card": opened.copies_asynchronously,
    }
    if opened.copies_asynchronously:
        properties: Any = torch.cuda.get_device_properties(opened.torch_device)
        arch = f"sm_{properties.major}{properties.minor}"
        if opened.kind != "cuda":
            arch = str(properties.gcnArchName).split(":")[0]
        found |= {"arch": arch, "built_for": torch.cuda.get_arch_list()}
    return found


def allocation(kind: str | None) -> dict[str, Any]:
    """Take most of the free memory in pieces, write each and read each back; a slow piece lies elsewhere."""
    opened = open_device(kind)
    wanted = _HOST_BYTES
    if opened.copies_asynchronously:
        wanted = int(opened.free_bytes() * ALLOCATED_SHARE)
    size = wanted // _PIECES // 8 * 8
    pieces: list[Tensor] = []
    refused = ""
    for number in range(_PIECES):
        try:
            piece = torch.empty(size // 8, dtype=torch.int64, device=opened.torch_device)
            pieces.append(piece.fill_(number + 1))
        except RuntimeError as error:
            refused = str(error).splitlines()[0]
            break
    if pieces:
        pieces[0].sum()  # the first sum loads its kernel
    opened.synchronize()
    seconds, wrong = [], 0
    for number, piece in enumerate(pieces):
        started = time.perf_counter()
        wrong += int(piece.sum()) != (number + 1) * piece.numel()
        seconds.append(time.perf_counter() - started)
    rates = sorted(size / one for one in seconds)
    return {
        "wanted_bytes": wanted,
        "bytes": size * len(pieces),
        "refused": refused,
        "wrong_pieces": wrong,
        "median_bytes_per_s": rates[len(rates) // 2] if rates else 0.0,
        "slowest_bytes_per_s": rates[0] if rates else 0.0,
    }


def matmul(kind: str | None) -> dict[str, Any]:
    """Products and their gradients, of rows and of columns, against the processor's."""
    opened = open_device(kind)
    # (M, K, N): square, one row, a LoRA's thin factor, sizes that divide by nothing
    shapes = [(256, 256, 256), (1, 512, 384), (192, 640, 16), (96, 320, 200), (67, 129, 45)]
    worst: dict[str, float] = {}
    for m, k, n in shapes:
        for layout in ("rows", "columns"):
            a, b = _random(opened, (m, k), 1), _random(opened, (k, n), 2)
            b = b if layout == "rows" else b.t().contiguous().t()
            error = _worst(lambda x, y: x @ y, (a, b))
            worst[layout] = max(worst.get(layout, 0.0), error)
    return {"worst": worst, "backend": _blas(opened), **_computes_in(opened)}


def attention(kind: str | None) -> dict[str, Any]:
    """Attention and its gradients for several widths of heads, against the processor's; which fused kernels run."""
    opened = open_device(kind)
    worst: dict[str, float] = {}
    kernels: dict[str, list[str]] = {}
    for width in (64, 128, 256):
        qkv = tuple(_random(opened, (1, 2, 96, width), seed) for seed in (3, 4, 5))
        for causal in (False, True):

            def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = causal) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            worst[str(width)] = max(worst.get(str(width), 0.0), _worst(attend, qkv))
        kernels[str(width)] = _fused_kernels(qkv)
    return {"worst": worst, "kernels": kernels, **_computes_in(opened)}


def four_bit(kind: str | None) -> dict[str, Any]:
    """The default format: encoded here and decoded here and on the processor, and a frozen product with its gradient."""
    opened = open_device(kind)
    name = BaseChoice.model_fields["format"].default.name
    fmt, shape = make_format(name), (384, 512)
    weight = _random(opened, shape, 6) * 0.02
    encoder = fmt.encoder(shape)
    encoder.push(weight)
    parts = encoder.finish()
    decoded = fmt.decode(parts, shape, opened.compute_dtype)
    on_host = {part: one.cpu() for part, one in parts.items()}
    truth = fmt.decode(on_host, shape, torch.float32).double()
    linear = FrozenLinear(shape[1], shape[0], has_bias=False, fmt=fmt, compute=opened.compute_dtype)
    linear.bind(parts)
    x = _random(opened, (64, shape[1]), 7).requires_grad_()
    out = linear(x)
    gradient = _random(opened, tuple(out.shape), 8)
    (back,) = torch.autograd.grad(out, x, gradient)
    exact = x.detach().cpu().double()
    return {
        **_computes_in(opened),
        "format": name,
        "kernel": fmt.kernel(opened.torch_device),
        "encode_error": _difference(decoded, weight.cpu().double()),
        "decode_error": _difference(decoded, truth),
        "forward_error": _difference(out, exact @ truth.t()),
        "backward_error": _difference(back, gradient.cpu().double() @ truth),
    }


def compiled(kind: str | None) -> dict[str, Any]:
    """A small function compiled there and back against eager."""
    opened = open_device(kind)

    def work(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.layer_norm(x @ w, (w.shape[1],))) * 0.5

    inputs = (_random(opened, (64, 96), 9), _random(opened, (96, 128), 10))
    started = time.perf_counter()
    error = _worst(torch.compile(work), inputs, truth=work)
    compile_s = time.perf_counter() - started
    return {"worst": {"compiled": error}, "compile_s": compile_s, **_computes_in(opened)}


def pinned(kind: str | None) -> dict[str, Any]:
    """Pin piece by piece until it is refused or enough; the rate of copies from pinned and ordinary memory."""
    import psutil

    opened = open_device(kind)
    most = min(_PINNED_MOST, int(psutil.virtual_memory().available * 0.4))
    buffers: list[HostBuffer] = []
    refused = ""
    while (len(buffers) + 1) * _PINNED_STEP <= most and not refused:
        buffer = opened.host_buffer(_PINNED_STEP)
        refused = buffer.why_not_pinned
        buffers.append(buffer)
    held = (len(buffers) - bool(refused)) * _PINNED_STEP
    found: dict[str, Any] = {"asked_bytes": most, "bytes": held, "refused": refused}
    if held:
        target = torch.empty(_PINNED_STEP, dtype=torch.uint8, device=opened.torch_device)
        ordinary = torch.zeros(_PINNED_STEP, dtype=torch.uint8)
        fast = _seconds(opened, lambda: target.copy_(buffers[0].tensor, non_blocking=True))
        slow = _seconds(opened, lambda: target.copy_(ordinary))
        found["pinned_bytes_per_s"] = _PINNED_STEP / fast
        found["pageable_bytes_per_s"] = _PINNED_STEP / slow
    for one in buffers:
        one.release()
    return found


def overlap(kind: str | None) -> dict[str, Any]:
    """How much of a copy hides behind products: 1 is all of the shorter of both."""
    opened = open_device(kind)
    host = opened.host_buffer(_PINNED_STEP)
    target = torch.empty(_PINNED_STEP, dtype=torch.uint8, device=opened.torch_device)
    a = torch.randn(4096, 4096, device=opened.torch_device, dtype=opened.compute_dtype)
    stream = torch.cuda.Stream(opened.torch_device)  # type: ignore[no-untyped-call] # torch's stub

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(host.tensor, non_blocking=True)

    copy_s = _seconds(opened, copy)
    repeats = max(1, round(copy_s / _seconds(opened, lambda: a @ a)))

    def compute() -> None:
        for _ in range(repeats):
            a @ a

    def both() -> None:
        copy()
        compute()

    compute_s, both_s = _seconds(opened, compute), _seconds(opened, both)
    host.release()
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    return {"copy_s": copy_s, "compute_s": compute_s, "both_s": both_s, "hidden": hidden}


def _computes_in(opened: Device) -> dict[str, str]:
    return {"compute_dtype": str(opened.compute_dtype).removeprefix("torch.")}


def _random(opened: Device, shape: tuple[int, ...], seed: int) -> Tensor:
    """The same numbers on every device, in its compute type."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(opened.compute_dtype).to(opened.torch_device)


def _worst(
    work: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    *,
    truth: Callable[..., Tensor] | None = None,
) -> float:
    """The largest relative error of a result and of its gradients, against float64 of the same inputs."""
    here = [one.detach().requires_grad_() for one in inputs]
    exact = [one.detach().cpu().double().requires_grad_() for one in inputs]
    out, true = work(*here), (truth or work)(*exact)
    gradient = torch.randn(true.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    back = torch.autograd.grad(out, here, gradient.to(out.device))
    true_back = torch.autograd.grad(true, exact, gradient.double())
    pairs = zip((out, *back), (true, *true_back), strict=True)
    return max(_difference(one, other) for one, other in pairs)


def _difference(found: Tensor, true: Tensor) -> float:
    """Relative, of all numbers together; infinite where one is no number."""
    there = found.detach().cpu().double()
    if not bool(torch.isfinite(there).all()):
        return float("inf")
    right = true.detach()
    return float((there - right).norm() / right.norm())


def _fused_kernels(qkv: tuple[Tensor, ...]) -> list[str]:
    """Names of the kernels that run there and back, not only say that they are there."""
    names = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    found = []
    for name, backend in names.items():
        q, k, v = (one.detach().requires_grad_() for one in qkv)
        try:
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(q, k, v)
            torch.autograd.grad(out, (q, k, v), out)
        except RuntimeError:  # "No available kernel": that it has none is what was asked
            continue
        found.append(name)
    return found


def _blas(opened: Device) -> str:
    if not opened.copies_asynchronously:
        return "the processor's"
    chosen: Callable[[], object] = torch.backends.cuda.preferred_blas_library
    return str(chosen()).rpartition(".")[2]


def _seconds(opened: Device, call: Callable[[], object], repeats: int = 5) -> float:
    """The median of a call, after two that do not count."""
    found = []
    for number in range(repeats + 2):
        opened.synchronize()
        started = time.perf_counter()
        call()
        opened.synchronize()
        if number >= 2:
            found.append(time.perf_counter() - started)
    return sorted(found)[repeats // 2]
