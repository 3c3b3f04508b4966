"""How fast this machine is at what a step and a start are made of; kept for plans (devices/_rates.py).

Each rate is the median of a few repetitions after a warm-up. On a card, matrices are large enough to fill it; on a
processor, small enough that all of it takes seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.base.files import sync_file
from outsize.devices._host import pageable, touch_
from outsize.devices._rates import (
    COMPUTE_TYPE,
    RATE_NAMES,
    arithmetics,
    operand_bytes,
    rates_folder,
    save_rates,
)
from outsize.formats.protocol import make_format
from outsize.placement._slab import CHUNK_BYTES, HostSlab
from outsize.recipes.recipe import BaseChoice

if TYPE_CHECKING:
    from outsize.devices.protocol import Device

Rate = tuple[str, float, str]
MIB = 2**20


def versions() -> dict[str, str]:
    """Versions of Python and of every package that has been imported and tells its own."""
    found = {"python": platform.python_version()}
    for name, module in sorted(sys.modules.items()):
        version = None if "." in name else getattr(module, "__version__", None)
        if isinstance(version, str) and name not in sys.stdlib_module_names:
            found[name] = version
    return found


def measure_rates(device: Device, folder: Path, *, with_imports: bool = True) -> Iterator[Rate]:
    """Rates one by one as (name, value, unit); folder: whose disk is measured. with_imports: how long libraries load too.

    Names are those of devices/_rates.py, "matmul_flops.NAME" for products of one arithmetic, and some that only this
    report has.
    """
    if device.copies_asynchronously:
        yield from _copy_rates(device)
    yield from _compute_rates(device)
    yield from _host_rates(device)
    yield from _disk_rates(folder)
    if with_imports:
        yield "import_s", _import_s(), "s"


def keep_rates(measured: dict[str, float], device_name: str) -> None:
    """Save what plans can use. device_name: as the machine's profile calls the card or processor."""
    values: dict[str, Any] = {name: value for name, value in measured.items() if name in RATE_NAMES}
    products = {
        name.partition(".")[2]: value
        for name, value in measured.items()
        if name.startswith("matmul_flops.")
    }
    save_rates(rates_folder(), device_name, values | {"matmul_flops": products})


def bus_rate(device: Device, num_bytes: int = 256 * MIB) -> float:
    """Bytes per second of a large copy from pinned memory to the device; 0 where copies do not run by themselves."""
    if not device.copies_asynchronously:
        return 0.0
    host = device.host_buffer(num_bytes)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    rate = num_bytes / _seconds(device, lambda: target.copy_(host.tensor, non_blocking=True))
    device.synchronize()
    host.release()
    return rate


def _copy_rates(device: Device) -> Iterator[Rate]:
    yield "first_touch_bytes_per_s", _pinning_rate(device), "GB/s"
    num_bytes = 1024 * MIB
    host = device.host_buffer(num_bytes)
    card = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    there = _seconds(device, lambda: card.copy_(host.tensor, non_blocking=True))
    back = _seconds(device, lambda: host.tensor.copy_(card, non_blocking=True))
    device.synchronize()
    ordinary = torch.zeros(num_bytes, dtype=torch.uint8)
    slow = _seconds(device, lambda: card.copy_(ordinary), repeats=3)
    host.release()
    yield "bus_bytes_per_s", num_bytes / there, "GB/s"
    yield "bus_back_bytes_per_s", num_bytes / back, "GB/s"
    yield "pageable_bytes_per_s", num_bytes / slow, "GB/s"


def _pinning_rate(device: Device) -> float:
    """Of pinned memory as streaming makes it: in pieces, by several threads."""
    num_bytes = min(8 * CHUNK_BYTES, psutil.virtual_memory().available // 4)
    started = time.perf_counter()
    slab = HostSlab(device, {0: num_bytes}, is_pinned=True)
    slab.segments(0)
    seconds = time.perf_counter() - started
    slab.close()
    return num_bytes / seconds


def _compute_rates(device: Device) -> Iterator[Rate]:
    """Products in the compute type and in 8 bits, attention as it trains, decoding, work element by element."""
    where, dtype = device.torch_device, device.compute_dtype
    is_card = device.copies_asynchronously
    size = 8192 if is_card else 1024
    a, b = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
    yield (
        f"matmul_flops.{COMPUTE_TYPE}",
        2 * size**3 / _seconds(device, lambda: a @ b, repeats=20),
        "TFLOP/s",
    )
    if is_card:
        yield from _eight_bit_rates(device, size)
    yield "attention_flops", _attention_flops(device, 4608 if is_card else 512), "TFLOP/s"
    yield (
        "decode_bytes_per_s",
        _decode_rate(device, (55296, 6144) if is_card else (2048, 2048)),
        "GB/s",
    )
    large = torch.zeros((512 if is_card else 64) * MIB // dtype.itemsize, device=where, dtype=dtype)
    seconds = _seconds(device, lambda: large.add_(1))
    yield "device_memory_bytes_per_s", 2 * large.nbytes / seconds, "GB/s"


def _eight_bit_rates(device: Device, size: int) -> Iterator[Rate]:
    """Products of e4m3 matrices with a scale for each row, where card and torch have them."""
    kind = torch.float8_e4m3fn
    x, w = (torch.randn(size, size, device=device.torch_device).to(kind) for _ in range(2))
    one_R1 = torch.ones(size, 1, device=device.torch_device)

    def multiply() -> Tensor:
        product: Tensor = torch._scaled_mm(  # noqa: SLF001 - as arithmetic/ calls it
            x, w.t(), scale_a=one_R1, scale_b=one_R1.view(1, -1), out_dtype=device.compute_dtype,
            use_fast_accum=True,
        )  # fmt: skip
        return product

    try:
        seconds = _seconds(device, multiply, repeats=20)
    except (RuntimeError, NotImplementedError):  # such a card has none: no rate is the answer
        return
    for name in arithmetics():
        if operand_bytes(name) == kind.itemsize:
            yield f"matmul_flops.{name}", 2 * size**3 / seconds, "TFLOP/s"


def _attention_flops(device: Device, tokens: int) -> float:
    """Of attention there and back: 4 T T D for each head forwards, 10 backwards (flash attention's five products)."""
    heads, width = 24, 128
    shape = (1, heads, tokens, width)
    q, k, v = (
        torch.randn(shape, device=device.torch_device, dtype=device.compute_dtype).requires_grad_()
        for _ in range(3)
    )

    def there_and_back() -> None:
        out = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), out)

    return 14 * tokens**2 * width * heads / _seconds(device, there_and_back)


def _decode_rate(device: Device, shape: tuple[int, int]) -> float:
    """Bytes read and written while a matrix in the format that recipes default to is decoded."""
    name = BaseChoice.model_fields["format"].default.name
    fmt = make_format(name)
    encoder = fmt.encoder(shape)
    encoder.push(torch.randn(shape, device=device.torch_device, dtype=device.compute_dtype))
    parts = encoder.finish()
    num_bytes = sum(one.nbytes for one in parts.values())
    num_bytes += shape[0] * shape[1] * device.compute_dtype.itemsize
    return num_bytes / _seconds(device, lambda: fmt.decode(parts, shape, device.compute_dtype))


def _host_rates(device: Device) -> Iterator[Rate]:
    num_bytes = 256 * MIB
    if not device.copies_asynchronously:
        started = time.perf_counter()
        touch_(pageable(num_bytes))
        yield "first_touch_bytes_per_s", num_bytes / (time.perf_counter() - started), "GB/s"
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    copy = _seconds(None, lambda: np.copyto(target, source))  # one thread
    yield "staging_bytes_per_s", num_bytes / copy, "GB/s"
    digest = _seconds(None, lambda: hashlib.sha256(source.data[: 64 * MIB]), repeats=3)
    yield "hash_bytes_per_s", 64 * MIB / digest, "GB/s"


def _disk_rates(folder: Path) -> Iterator[Rate]:
    """Of one large file, written and forced to disk, then read with the page cache told to forget it (where it can be)."""
    num_bytes, piece = 512 * MIB, os.urandom(16 * MIB)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="outsize-bench-", dir=folder) as place:
        path = Path(place) / "data"
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(num_bytes // len(piece)):
                file.write(piece)
        sync_file(path)
        yield "disk_write_bytes_per_s", num_bytes / (time.perf_counter() - started), "GB/s"
        buffer = memoryview(bytearray(16 * MIB))
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            while file.readinto(buffer):
                pass
        yield "disk_read_bytes_per_s", num_bytes / (time.perf_counter() - started), "GB/s"


def _import_s() -> float:
    """Of what training imports, in a fresh process, from a page cache that this process has warmed."""
    program = "import outsize.app.train, diffusers.models.transformers, diffusers.loaders"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)  # noqa: S603 - a fixed list, no shell
    return time.perf_counter() - started


def _seconds(device: Device | None, call: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a call, after two that do not count."""
    found = []
    for number in range(repeats + 2):
        started = time.perf_counter()
        call()
        if device is not None:
            device.synchronize()
        if number >= 2:
            found.append(time.perf_counter() - started)
    return statistics.median(found)
