"""What 8-bit arithmetic costs the gradients of an adapter, beside what 4-bit storage costs them already.

Three passes over the same blocks with the same adapter and the same inputs: matrices in 16 bits and products in the
compute type; matrices in 4 bits and products in the compute type; matrices in 4 bits and products in 8 bits. For each tensor
of the adapter: the cosine between the second and the first gradient is what storage costs, that between the third and the
second what arithmetic costs. The sixteen-bit model is the same draw of random weights as the four-bit one.

    python tools/fp8_gradients.py --model flux2.dev@2+6 --device cuda --out gradients.json

A's gradient passes through B, which is zero where training starts and is random here, so that both factors get one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what exact kernels need

import torch
from fp8_models import Adapted, opened
from torch import Tensor

from outsize.app._bench_cases import case_recipes
from outsize.app._bench_rates import versions
from outsize.app._bench_weights import latent_shape
from outsize.app.parts import BASE, parts_of
from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic
from outsize.base.files import write_json_atomically
from outsize.devices.protocol import Device, open_device
from outsize.objectives.protocol import OBJECTIVES, FlowObjective

SIXTEEN_BITS, FOUR_BITS = "plain", "nf4"
COMPUTE_TYPE, EIGHT_BITS = "bf16", "fp8"
WAYS = {
    "reference": (SIXTEEN_BITS, COMPUTE_TYPE),
    "stored": (FOUR_BITS, COMPUTE_TYPE),
    "computed": (FOUR_BITS, EIGHT_BITS),
}

Gradients = list[dict[str, Tensor]]  # of each sample by name


@dataclass(frozen=True, slots=True)
class Case:
    """What all passes share. samples: (noise level, seed) of each."""

    model: str
    side: int
    rank: int
    samples: tuple[tuple[float, int], ...]


def main() -> None:
    """Measure, print the table, write the JSON."""
    asked = _arguments()
    started = time.perf_counter()
    torch.use_deterministic_algorithms(True)
    device = open_device(asked.device)
    case = Case(
        asked.model,
        asked.side,
        asked.rank,
        tuple(itertools.product(asked.sigmas, asked.seeds)),
    )
    passes = {name: _pass(case, device, *way) for name, way in WAYS.items()}
    rows = compare({name: gradients for name, (gradients, _) in passes.items()})
    losses = {name: found for name, (_, found) in passes.items()}
    device.synchronize()
    result = {
        "what": "cosines of adapter gradients: arithmetic in 8 bits, beside storage in 4 bits",
        "command": f"fp8_gradients.py --model {case.model} --side {case.side} --rank {case.rank}",
        "device": device.name,
        "versions": versions(),
        "samples": [{"sigma": sigma, "seed": seed} for sigma, seed in case.samples],
        "seconds": round(time.perf_counter() - started, 1),
        "losses": losses,
        "loss_difference": {
            "storage": _off(losses["stored"], losses["reference"]),
            "arithmetic": _off(losses["computed"], losses["stored"]),
        },
        "summary": summary(rows),
        "by_role": by_role(rows),
        "tensors": rows,
    }
    _print(result)
    if asked.out is not None:
        write_json_atomically(asked.out, result)


def compare(gradients: dict[str, Gradients]) -> list[dict[str, Any]]:
    """One row for each tensor: its role, and both cosines as mean and minimum over the samples."""
    rows = []
    for name in gradients["reference"][0]:
        storage, arithmetic = (
            [
                _cosine(one[name], other[name])
                for one, other in zip(gradients[a], gradients[b], strict=True)
            ]
            for a, b in (("stored", "reference"), ("computed", "stored"))
        )
        rows.append(
            {
                "tensor": name,
                "factor": name.rpartition("_")[2],
                "storage": mean(storage),
                "storage_min": min(storage),
                "arithmetic": mean(arithmetic),
                "arithmetic_min": min(arithmetic),
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean and minimum of both cosines, and the share of tensors for which arithmetic costs less than storage."""
    return {
        "tensors": len(rows),
        "storage_mean": mean(row["storage"] for row in rows),
        "storage_min": min(row["storage_min"] for row in rows),
        "arithmetic_mean": mean(row["arithmetic"] for row in rows),
        "arithmetic_min": min(row["arithmetic_min"] for row in rows),
        "share_where_arithmetic_costs_less": mean(
            row["arithmetic"] > row["storage"] for row in rows
        ),
    }


def by_role(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The summary of each kind of linear (its name within the block) and factor."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        path = row["tensor"].rpartition(".")[0].split(".")
        kind = path[0] if path else ""
        leaf = ".".join(part for part in path[2:] if not part.isdigit())
        groups.setdefault(f"{kind}.{leaf} {row['factor']}", []).append(row)
    return {name: summary(group) for name, group in sorted(groups.items())}


def _pass(case: Case, device: Device, fmt: str, arithmetic: str) -> tuple[Gradients, list[float]]:
    """Gradients and losses of all samples over one model."""
    started = time.perf_counter()
    (recipe,) = case_recipes(
        case.model,
        {"base.format": fmt, "data.resolution": case.side, "adapter.rank": case.rank},
        {},
    )
    part = parts_of(recipe)[BASE]
    with opened(part, device, _arithmetic(arithmetic, device), rank=case.rank) as base:
        found = [_gradients(base, case.side, *one) for one in case.samples]
    print(
        f"{fmt} weights, {arithmetic} products: {time.perf_counter() - started:.1f} s", flush=True
    )
    return [one for one, _ in found], [loss for _, loss in found]


def _arithmetic(name: str, device: Device) -> Arithmetic:
    """The plug-in; on a processor whatever its fault, to try this program out."""
    chosen: Arithmetic = ARITHMETICS.load(name)
    fault = chosen.fault(device.torch_device)
    if fault is not None and device.kind != "cpu":
        raise SystemExit(f"products in {name} cannot be had: {fault}")
    return chosen


def _gradients(
    base: Adapted, side: int, sigma: float, seed: int
) -> tuple[dict[str, Tensor], float]:
    """Of one random picture and text at one noise level."""
    part, device, model = base.part, base.device, base.model
    family: Any = part.family
    shape = latent_shape(family, part.variant, side)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device.torch_device)

    clean, noise = draw(1, *shape), draw(1, *shape)
    conditions = {
        name: draw(1, *size).to(device.compute_dtype)
        for name, size in family.condition_shapes(part.variant).items()
    }
    guidance = family.training_guidance(part.variant)
    objective: FlowObjective = OBJECTIVES.load(family.objective)()
    model.begin("train")
    loss = objective.loss(
        lambda noisy, sigma_B: family.predict(
            part.variant, model.module, noisy, sigma_B, conditions, guidance
        ),
        clean,
        torch.tensor([sigma], device=device.torch_device),
        noise,
        torch.ones(1, device=device.torch_device),
        device.compute_dtype,
    )
    loss.backward()
    found = {}
    for name, one in base.adapter.parameters().items():
        assert one.grad is not None, f"no gradient reaches {name}"
        assert one.grad.isfinite().all(), f"the gradient of {name} is not finite"
        found[name], one.grad = one.grad, None
    return found, loss.item()


def _cosine(a: Tensor, b: Tensor) -> float:
    x, y = a.double().flatten(), b.double().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def _off(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def _print(result: dict[str, Any]) -> None:
    print(f"\n{'':50} tensors   4-bit storage      8-bit arithmetic   arithmetic")
    print(
        f"{'cosine of the gradient, mean and least':50}           mean     min      mean     min   costs less"
    )
    for name, one in [*result["by_role"].items(), ("all", result["summary"])]:
        print(
            f"{name:50} {one['tensors']:7}  {one['storage_mean']:.4f}  {one['storage_min']:.4f}"
            f"   {one['arithmetic_mean']:.4f}  {one['arithmetic_min']:.4f}"
            f"   {one['share_where_arithmetic_costs_less']:9.0%}"
        )
    off = result["loss_difference"]
    print(
        f"loss, largest relative difference: storage {off['storage']:.2e}, arithmetic {off['arithmetic']:.2e}"
    )
    print(f"{result['seconds']} s on {result['device']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", default="flux2.dev@2+6", help="FAMILY.VARIANT; @ reduces the depth"
    )
    parser.add_argument("--side", type=int, default=512, help="pixels")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--sigmas", type=float, nargs="+", default=[0.2, 0.5, 0.8], help="noise levels"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default=None, help="cuda, rocm or cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
