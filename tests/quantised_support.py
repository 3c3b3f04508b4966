"""Checkpoints in 4 bits, written by transformers and bitsandbytes as people write them, and what bitsandbytes decodes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from language_support import upstream_class, upstream_model
from safetensors.torch import load_file, save_file
from tiny import random_tensors
from torch import Tensor

from outsize.app.wanted import Wanted, wanted
from outsize.base.table import ShapeTable
from outsize.families.protocol import FAMILIES
from outsize.formats._nf4_values import VALUES
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.weights.header import build_header
from outsize.weights.locate import locate_weights
from outsize.weights.packet import view
from outsize.weights.source import Source
from outsize.weights.store import Store

STATE = "quant_state.bitsandbytes__nf4"


def write_plain(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A tiny language model in 16 bits, saved by transformers."""
    plugin: Any = FAMILIES.load(family)
    tensors = random_tensors(plugin.table("tiny"), seed=3, dtype=dtype)
    upstream_model(family, tensors).to(dtype).save_pretrained(folder)
    return folder


def write_quantised(
    family: str,
    plain: Path,
    folder: Path,
    *,
    is_double: bool,
    skip: Sequence[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Path:
    """The same in 4 bits: transformers loads it with bitsandbytes and saves it. skip: modules left as they are."""
    import transformers

    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_use_double_quant=is_double,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if skip is None else list(skip),
        **{"bnb_4bit_quant_type": "nf4", **options},
    )
    model = upstream_class(family).from_pretrained(
        plain, quantization_config=settings, dtype=dtype, device_map="cpu"
    )
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def decoded_by_bitsandbytes(family: str, folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model as transformers loads the folder and bitsandbytes decodes it; nothing of ours is in it."""
    from bitsandbytes.functional import dequantize_4bit

    model = upstream_class(family).from_pretrained(folder, dtype="auto", device_map="cpu")
    found = {}
    for name, one in model.state_dict(keep_vars=True).items():
        state = getattr(one, "quant_state", None)
        if isinstance(one, Tensor):
            found[name] = dequantize_4bit(one.data, state) if state is not None else one.data
    return found


def packing_of(family: str, name: str = "nf4", **options: object) -> Packing:
    return assign(
        FAMILIES.load(family).table("tiny"), make_format(name, options), make_format("plain")
    )


def want(source: Source, family: str, cache: Path, packing: Packing | None = None) -> Wanted:
    """The store of an opened checkpoint."""
    plugin: Any = FAMILIES.load(family)
    return wanted(
        name=family,
        table=plugin.table("tiny"),
        layouts=plugin.layouts("tiny"),
        source=source,
        packing=packing or packing_of(family),
        cache_root=cache,
    )


def source_of(folder: Path) -> Source:
    return Source(locate_weights(str(folder)))


def decoded_by_us(
    store: Store, packing: Packing, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Every tensor of a store, decoded by its format to the dtype asked for."""
    found = {}
    for file in store.files:
        raw = torch.from_file(str(store.path(file.block)), size=file.file_bytes, dtype=torch.uint8)
        buffer = raw[file.data_begin :].clone()
        for name in file.packet.tensors():
            parts = {part: view(one, buffer) for part, one in file.packet.parts(name).items()}
            fmt, shape = packing.formats[name], packing.shapes[name]
            found[name] = fmt.decode(parts, shape, dtypes[name])
    return found


def altered(folder: Path, to: Path, change: Mapping[str, Tensor | None]) -> Path:
    """The same checkpoint in one file, some tensors replaced, added or (None) taken out; config.json goes with it."""
    to.mkdir(parents=True)
    tensors: dict[str, Tensor | None] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    tensors |= change
    left = {name: one for name, one in tensors.items() if one is not None}
    save_file(left, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files by name."""
    return {
        name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }


def state_of(tensor: Tensor) -> dict[str, Any]:
    """The JSON that bitsandbytes packs into a tensor."""
    values: dict[str, Any] = json.loads(bytes(tensor.tolist()))
    return values


def as_state(values: Mapping[str, Any]) -> Tensor:
    """And back."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def write_sparse_quantised(path: Path, table: ShapeTable) -> int:
    """All matrices of a table in 4 bits with double scales, codes of zeros that take no disk; returns the file's bytes."""
    rows, small, position = [], {}, 0
    for spec in table:
        groups = spec.num_elements // 64
        state = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": list(spec.shape),
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": 0.5,
        }
        parts: dict[str, tuple[str, tuple[int, ...], bytes]] = {
            "": ("U8", (spec.num_elements // 2, 1), b""),
            ".absmax": ("U8", (groups,), b""),
            ".nested_absmax": ("F32", (-(-groups // 256),), b""),
            ".nested_quant_map": ("F32", (256,), b""),
            ".quant_map": ("F32", (16,), struct.pack("<16f", *VALUES)),
            f".{STATE}": ("U8", (len(json.dumps(state)),), json.dumps(state).encode()),
        }
        for end, (dtype, shape, content) in parts.items():
            stop = position + shape[0] * (4 if dtype == "F32" else 1)
            rows.append((spec.name + end, dtype, shape, position, stop))
            small[position] = content
            position = stop
    header = build_header(rows, {}, alignment=8)
    with path.open("wb") as file:
        file.write(header)
        for begin, content in small.items():
            file.seek(len(header) + begin)
            file.write(content)
        file.truncate(len(header) + position)
    return len(header) + position
