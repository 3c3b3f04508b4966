"""Short ways to write rows of a shape table: what each kind of upstream module puts into a state dict.

Pure data; the order of the rows is that of upstream's state dict, so that the two can be compared as lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outsize.base.table import Role, TensorSpec

Specs = tuple[TensorSpec, ...]


def linear(name: str, num_out: int, num_in: int, role: Role, *, has_bias: bool = False) -> Specs:
    """An nn.Linear: weight (num_out, num_in), bias (num_out,)."""
    weight = TensorSpec(f"{name}.weight", (num_out, num_in), role, is_linear=True)
    return (weight, TensorSpec(f"{name}.bias", (num_out,), role)) if has_bias else (weight,)


def conv(name: str, num_out: int, num_in: int, kernel: int = 3) -> Specs:
    """An nn.Conv2d with a bias: weight (num_out, num_in, kernel, kernel)."""
    return (
        TensorSpec(f"{name}.weight", (num_out, num_in, kernel, kernel), "conv"),
        TensorSpec(f"{name}.bias", (num_out,), "conv"),
    )


def norm(name: str, width: int, *, has_bias: bool = False) -> Specs:
    """A norm's scale and, where it has one, shift."""
    weight = TensorSpec(f"{name}.weight", (width,), "norm")
    return (weight, TensorSpec(f"{name}.bias", (width,), "norm")) if has_bias else (weight,)


def embedding(name: str, num_rows: int, width: int) -> Specs:
    """An nn.Embedding: a table that is looked up, never multiplied with, so no format may pack it."""
    return (TensorSpec(f"{name}.weight", (num_rows, width), "embed"),)


def within(prefix: str, specs: Iterable[TensorSpec], *, block: int | None = None) -> Specs:
    """The same tensors under a module path, belonging to a block."""
    return tuple(replace(spec, name=f"{prefix}.{spec.name}", block=block) for spec in specs)
