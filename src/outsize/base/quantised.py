"""A matrix that a checkpoint holds in few bits already: what it says of itself, for the format that takes it as it is."""

from __future__ import annotations

from dataclasses import dataclass

CODES = "codes"  # the part that holds them, in every format that takes such matrices


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How one matrix is held, in the words of bitsandbytes' QuantState.

    quant_type: its table of values, which are `values`. group: weights to a scale. dtype: torch's name of the type to which
    bitsandbytes decodes it. nested_group: scales to a scale of their own, where they are in 8 bits around `offset`; else None.
    """

    quant_type: str
    group: int
    dtype: str
    values: tuple[float, ...]
    nested_group: int | None = None
    offset: float = 0.0

    def __str__(self) -> str:
        double = "" if self.nested_group is None else ", double scales"
        return f"{self.quant_type} in groups of {self.group}{double}"
