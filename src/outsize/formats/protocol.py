"""What a format is: a frozen matrix in few bits, and nothing about names or files.

A plug-in file binds `plugin` to a frozen dataclass whose fields are the options a recipe may set; an instance is a
Format. Its module imports without torch: plan asks for sizes only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.options import build_with_options
from outsize.base.parts import Part
from outsize.base.quantised import StoredForm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMATS = Catalogue("outsize.formats", "format")


class Encoder(Protocol):
    """Takes a matrix by slabs of whole rows, in order, and gives its parts."""

    def push(self, rows_NK: Tensor) -> None:
        """Encode the next rows, on the device where they are."""

    def finish(self) -> dict[str, Tensor]:
        """The parts, equal to what one push of the whole matrix would give."""


class KeepingEncoder(Encoder, Protocol):
    """What an encoder adds that takes rows in a type of few bits as they are, with a scale for each, rounding nothing again."""

    keeps: torch.dtype | None
    """That type; None: there is none."""

    def push_codes(self, codes_RK: Tensor, scales_R: Tensor) -> None:
        """The next rows, and their scales (R,) in fp32."""


class Adopter(Protocol):
    """Takes one matrix that a checkpoint holds in few bits already, choosing no code again."""

    def parts(self) -> dict[str, Tensor]:
        """The parts beside the codes, which are taken as they lie in the file."""

    def decode(self, codes: Tensor, first_row: int) -> Tensor:
        """Some rows from their codes, as the library that wrote the file decodes them, in the type to which it does."""


class Adopting(Protocol):
    """What a format adds whose codes other programs write as well. Its part "codes" is the first, and lies row by row."""

    def adopts(self, form: StoredForm, shape: tuple[int, ...]) -> str | None:
        """Why a matrix in that form cannot be taken as it is, after its name; None when it can."""

    def adopter(
        self, form: StoredForm, shape: tuple[int, ...], stored: Mapping[str, Tensor]
    ) -> Adopter:
        """Takes a matrix with which `adopts` finds no fault; stored: its parts beside the codes."""


class Turning(Protocol):
    """Products with a matrix W R, kept in place of W: x W' = (x R)(W R)', R orthogonal.

    Turning activations costs about block / N of the product, which has N outputs; turning the matrix back, several times as
    much as decoding it. So products are made with what is kept.
    """

    def turn(self, x: Tensor) -> Tensor:
        """X R; (..., K) -> (..., K), in x's type."""

    def turn_back(self, grad: Tensor) -> Tensor:
        """The gradient of x, from that of x R."""

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix W R (N, K) in `dtype`."""


class Publishing(Protocol):
    """What a format adds whose matrices other programs read from a checkpoint."""

    def published(self, shape: tuple[int, ...]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The tensors of a matrix of this shape: what follows the weight's name, dtype code and shape of each, in order.

        Raises: FormatError when the options are such that no other program could read it.
        """

    def publish(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: str
    ) -> dict[str, Tensor]:
        """These tensors on the host, by what follows the weight's name. dtype: torch's name of what readers decode to."""

    def published_config(self, dtype: str, plain: Collection[str]) -> dict[str, Any]:
        """What config.json says under quantization_config. plain: paths of linears that are not packed."""


class Format(Protocol):
    """A frozen matrix in few bits."""

    def kernel(self, device: torch.device) -> str:
        """What decodes on that device, for the journal: "bitsandbytes 0.50.2", "torch", with the reason if amiss."""

    def describe(self) -> dict[str, Any]:
        """Name, options and code version as JSON values: goes into store keys and manifests."""

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of this shape can be held (K a multiple of the group, say)."""

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The stored tensors of a matrix of this shape, in order."""

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """A fresh encoder for one matrix (N, K)."""

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) in `dtype`, on the parts' device; the fastest kernel there, the same values everywhere."""


def make_format(name: str, options: Mapping[str, Any] | None = None) -> Format:
    """The format of that name with those options.

    Raises: RecipeError for an unknown name, option or value.
    """
    made: Format = build_with_options(f"format {name!r}", FORMATS.load(name), options or {})
    return made
