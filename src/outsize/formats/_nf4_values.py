"""What nf4's codes stand for, and whether what a checkpoint says of its own fits; imports without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outsize.base.quantised import StoredForm

# bitsandbytes.functional.get_4bit_type("nf4"), exactly.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
NESTED_GROUP = 256  # bitsandbytes' own, for scales that are quantised again
_TOLERANCE = 1e-6  # bitsandbytes decodes by its own table, whatever the last bit of a file's
_DTYPES = ("float32", "bfloat16", "float16")


def fault_of(form: StoredForm) -> str | None:
    """What of a form no option could hold, after the matrix's name; None when there is nothing."""
    if form.nested_group not in (None, NESTED_GROUP):
        return f"has a scale for each {form.nested_group} of its scales, which are {NESTED_GROUP} in bitsandbytes"
    if form.dtype not in _DTYPES:
        return f"is to be decoded to {form.dtype}, which bitsandbytes does not do"
    off = max(abs(a - b) for a, b in zip(form.values, VALUES, strict=True))
    if not off <= _TOLERANCE:
        return f"has a quant_map whose values are not those of {form.quant_type}"
    return None
