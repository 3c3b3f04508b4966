"""A matrix in nf4 as bitsandbytes keeps it in a checkpoint, so that transformers and diffusers read what was merged.

Beside the codes under the weight's own name lie its state's tensors, named by what follows it; see weights/quantised.py,
which reads them. The state's JSON is padded with spaces: what a header says of its length must not depend on values.
Source: bitsandbytes.functional.QuantState.as_dict(packed=True).

Dimensions: N rows, K columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from outsize.formats._nf4_values import NESTED_GROUP, VALUES

if TYPE_CHECKING:
    from torch import Tensor

_STATE_BYTES = 256  # it takes about 170
_STATE = ".quant_state.bitsandbytes__"


def published(
    shape: tuple[int, ...], quant_type: str, *, group: int, is_double: bool
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What follows the weight's name, dtype code and shape of each tensor, in order."""
    count = math.prod(shape)
    groups = count // group
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("", "U8", (count // 2, 1)),
        (".absmax", "U8" if is_double else "F32", (groups,)),
    ]
    if is_double:
        rows += [
            (".nested_absmax", "F32", (-(-groups // NESTED_GROUP),)),
            (".nested_quant_map", "F32", (256,)),
        ]
    rows += [
        (".quant_map", "F32", (len(VALUES),)),
        (_STATE + quant_type, "U8", (_STATE_BYTES,)),
    ]
    return tuple(rows)


def publish(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], quant_type: str, *, group: int, dtype: str
) -> dict[str, Tensor]:
    """The tensors of `published` from a format's parts, on the host. dtype: torch's name of what it is decoded to."""
    import torch

    host = {name: part.cpu() for name, part in parts.items()}
    state: dict[str, Any] = {
        "quant_type": quant_type,
        "blocksize": group,
        "dtype": dtype,
        "shape": list(shape),
    }
    made = {"": host["codes"].view(-1, 1), ".quant_map": torch.tensor(VALUES)}
    if "nested_scales" in host:
        state |= {
            "nested_blocksize": NESTED_GROUP,
            "nested_dtype": "float32",
            "nested_offset": float(host["offset"]),
        }
        made[".absmax"] = host["scales"]
        made[".nested_absmax"] = host["nested_scales"]
        made[".nested_quant_map"] = host["nested_table"]
    else:
        made[".absmax"] = host["scales"].float()
    text = json.dumps(state).encode()
    assert len(text) <= _STATE_BYTES, "two shapes and a few words"
    padded = text.ljust(_STATE_BYTES)
    made[_STATE + quant_type] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    return made


def config(
    quant_type: str, *, is_double: bool, dtype: str, plain: Collection[str]
) -> dict[str, Any]:
    """What config.json says under quantization_config. plain: paths of linears that are not packed."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": is_double,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": sorted(plain),
    }
