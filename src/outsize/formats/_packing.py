"""Which tensor of a model is held in which format.

The linears inside blocks go into the format asked for; what it cannot hold, and everything else, stays plain, and the
former are listed so that plan and journal can say so. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.base.parts import Part
from outsize.base.table import ShapeTable, TensorSpec
from outsize.formats.protocol import Format, make_format


@dataclass(frozen=True, slots=True)
class LeftPlain:
    """A linear inside a block that the format could not hold."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Packing:
    """The format of every tensor of a table, by tensor name, in the table's order."""

    packed: Format
    plain: Format
    buffers: Format
    formats: Mapping[str, Format]
    shapes: Mapping[str, tuple[int, ...]]
    left_plain: tuple[LeftPlain, ...]

    def parts(self, name: str) -> tuple[Part, ...]:
        """The stored tensors of one tensor.

        Raises: KeyError for a name that the table does not have.
        """
        return self.formats[name].parts(self.shapes[name])

    def describe(self) -> dict[str, Any]:
        """The formats as JSON values: goes, beside the table, into store keys and manifests."""
        return {
            "linears": self.packed.describe(),
            "others": self.plain.describe(),
            "buffers": self.buffers.describe(),
            "left_plain": [left.name for left in self.left_plain],
        }


def assign(table: ShapeTable, fmt: Format, plain: Format) -> Packing:
    """Give each tensor its format: fmt for the linears inside blocks, plain for the rest, but buffers in fp32.

    plain: holds every shape and has the option `dtype`. Buffers are running statistics and the like: small, and wrong
    when rounded.
    """
    buffers = make_format(plain.describe()["name"], {"dtype": "fp32"})
    formats: dict[str, Format] = {}
    left: list[LeftPlain] = []
    for spec in table:
        is_candidate = spec.is_linear and spec.block is not None
        if spec.role == "buffer":
            formats[spec.name] = buffers
        elif is_candidate and fmt.supports(spec.shape):
            formats[spec.name] = fmt
        else:
            formats[spec.name] = plain
            if is_candidate:
                left.append(LeftPlain(spec.name, spec.shape, _reason(spec, fmt)))
    shapes = {spec.name: spec.shape for spec in table}
    return Packing(fmt, plain, buffers, formats, shapes, tuple(left))


def _reason(spec: TensorSpec, fmt: Format) -> str:
    described = fmt.describe()
    name, group = described["name"], described.get("group")
    if group and len(spec.shape) == 2:
        return f"its {spec.shape[1]} columns are no multiple of {name}'s group of {group}"
    return f"{name} does not hold the shape {spec.shape}"
