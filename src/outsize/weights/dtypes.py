"""dtype codes of safetensors files and torch's dtypes, one to one; torch is imported when first asked."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from outsize.base.errors import SourceError

if TYPE_CHECKING:
    import torch

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    import torch

    # An older torch lacks some of the newer float8 kinds.
    return {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code.

    Raises: SourceError when this torch has no such dtype.
    """
    dtypes = _dtypes()
    if code not in dtypes:
        raise SourceError(
            f"dtype {code} has no counterpart in this torch; known are {', '.join(dtypes)}"
        )
    return dtypes[code]


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of a torch dtype.

    Raises: SourceError when safetensors has no code for it.
    """
    for code, known in _dtypes().items():
        if known == dtype:
            return code
    raise SourceError(f"{dtype} has no safetensors code; known are {', '.join(_NAMES)}")
