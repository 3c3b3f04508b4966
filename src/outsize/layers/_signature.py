"""Of which kind a block is: all that its code may ask of itself beside the values of its tensors.

Blocks of one kind share compiled graphs, so what differs must show here: types of modules, plain attributes (those in
containers and simple objects too), shapes, types and trainability of tensors, formats, arithmetics.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from outsize.layers.frozen import FrozenLinear

# PEFT's layers know their own path; which of the blocks it leads to makes no difference.
_BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def signature_of(module: nn.Module) -> tuple[Any, ...]:
    """The kind of a block, as a hashable value."""
    rows: list[Any] = []
    for path, one in module.named_modules():
        tensors = {**one._parameters, **one._buffers}  # noqa: SLF001 - as they stand, None included
        metas = tuple(
            (name, None if t is None else (t.shape, t.dtype, t.requires_grad, t.is_meta))
            for name, t in tensors.items()
        )
        rows.append(
            (
                path,
                _type_name(one),
                _plain(vars(one), skip=("_parameters", "_buffers", "_modules", "parts")),
                metas,
            )
        )
        if isinstance(one, FrozenLinear):
            rows.append((repr(one.format), _type_name(one.arithmetic)))
    return tuple(rows)


def _plain(
    values: dict[str, Any], *, depth: int = 2, skip: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """The plain values among attributes, those within containers and simple objects too."""
    return tuple((name, _as_plain(one, depth)) for name, one in values.items() if name not in skip)


def _as_plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _BLOCK_NUMBER.sub("#", value)
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return value
    if depth and isinstance(value, tuple | list | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return tuple(_as_plain(one, depth - 1) for one in items)
    if depth and isinstance(value, dict):
        return tuple((str(key), _as_plain(one, depth - 1)) for key, one in value.items())
    is_simple = hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type)
    if depth and is_simple and not callable(value):
        return (_type_name(value), _plain(vars(value), depth=depth - 1))
    return _type_name(value)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
