"""Which tensor of a model is held in which format.

The linears inside blocks go into the format asked for; what it cannot hold, and everything else, stays plain, and the
former are listed so that plan and journal can say so. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from outsize.base.parts import Part
from outsize.base.quantised import StoredForm
from outsize.base.table import ShapeTable, TensorSpec
from outsize.formats.protocol import FORMATS, Format, make_format

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.formats.protocol import Adopter, Adopting


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

    def adopts(self, form: StoredForm, shape: tuple[int, ...]) -> str | None:
        """Why a matrix that a checkpoint holds in that form cannot be taken as it is, after its name; None when it can."""
        check: Callable[[StoredForm, tuple[int, ...]], str | None] | None = getattr(
            self.packed, "adopts", None
        )
        if check is not None:
            return check(form, shape)
        remedy = (
            f": set `format` to {form.quant_type}" if form.quant_type in FORMATS.names() else ""
        )
        return f"is {form.quant_type}, which {self.packed.describe()['name']} cannot take{remedy}"

    def adopter(self, name: str, form: StoredForm, stored: Mapping[str, Tensor]) -> Adopter:
        """Takes one matrix that `adopts` has no fault to find with; stored: its parts beside the codes."""
        return cast("Adopting", self.packed).adopter(form, self.shapes[name], stored)

    def beside(self, adopted: Collection[str], why: str) -> Packing:
        """The packing of a checkpoint that holds some matrices in few bits: the linears beside them stay plain too.

        They were left out on purpose, as those that suffer most. adopted: names of the matrices. why: for `left_plain`.
        """
        left = [
            LeftPlain(name, self.shapes[name], why)
            for name, fmt in self.formats.items()
            if fmt is self.packed and name not in adopted
        ]
        formats = {**self.formats, **{one.name: self.plain for one in left}}
        return replace(self, formats=formats, left_plain=(*self.left_plain, *left))

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
    if isinstance(group, int) and len(spec.shape) == 2:
        return f"its {spec.shape[1]} columns are no multiple of {name}'s group of {group}"
    return f"{name} does not hold the shape {spec.shape}"
