"""Checks of doctor that need what only app may put together: an optimiser of training, and the rates that plans use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.app._bench_rates import keep_rates, measure_rates
from outsize.devices.protocol import open_device
from outsize.train.optimizers.protocol import OptimizerSettings, make_optimizer

_STEPS = 20


def eight_bit_optimizer(kind: str | None, name: str) -> dict[str, Any]:
    """Steps of an optimiser towards random targets, against torch's AdamW with moments in fp32."""
    opened = open_device(kind)
    settings = OptimizerSettings(
        learning_rate=0.01, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.01
    )
    shape = (64, 256)  # large enough that the state is in 8 bits
    target = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(opened.torch_device)
    masters = [torch.nn.Parameter(torch.zeros_like(target)) for _ in range(2)]
    optimizers = [
        make_optimizer(name)(masters[:1], settings),
        torch.optim.AdamW(masters[1:], 0.01, (0.9, 0.999), 1e-8, 0.01),
    ]
    for _ in range(_STEPS):
        for master, optimizer in zip(masters, optimizers, strict=True):
            master.grad = master.detach() - target
            optimizer.step()
    found, true = (one.detach().cpu() for one in masters)
    state = optimizers[0].state[masters[0]].values()
    kinds = {str(one.dtype).removeprefix("torch.") for one in state if isinstance(one, Tensor)}
    return {
        "difference": float((found - true).norm() / true.norm()),
        "steps": _STEPS,
        "state_types": sorted(kinds),
    }


def rates(kind: str | None, folder: str, device_name: str) -> dict[str, Any]:
    """What `outsize bench --rates` measures but for the seconds that imports take, kept for plans as it keeps them."""
    opened = open_device(kind)
    rates = measure_rates(opened, Path(folder), with_imports=False)
    measured = {name: value for name, value, _ in rates}
    keep_rates(measured, device_name)
    return measured
