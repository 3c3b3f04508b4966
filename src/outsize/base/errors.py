"""One error class per thing a caller would do differently, and the exit code of each.

A message says what happened with the measured value, why it matters, and the smallest remedy. Anything else that
escapes is a defect of ours and ends with Python's traceback and exit code 1.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_COMPLETED = 0
EXIT_STOPPED = 3  # the run was asked to stop, saved its state and can be resumed


class OutsizeError(Exception):
    """An error the user can act on; printed without a traceback. Raised as one of the classes below."""

    exit_code: ClassVar[int]
    retries: ClassVar[int] = (
        0  # how often a worker tries an order again that ended so: not, unless time may heal it
    )


class RecipeError(OutsizeError):
    """The recipe is wrong: correct the file."""

    exit_code = 2


class DoesNotFit(OutsizeError):  # noqa: N818 - reads as the claim it makes
    """The plan needs more memory than the machine has: take the named change."""

    exit_code = 4


class SourceError(OutsizeError):
    """The checkpoint, tokenizer or picture that was pointed to is missing or not what it should be."""

    exit_code = 5


class StoreBroken(OutsizeError):  # noqa: N818
    """A prepared store, a cache entry or the registry is torn or was altered: prepare it again, or put back a copy."""

    exit_code = 6
    retries = 1


class FormatError(OutsizeError):
    """A tensor cannot be held in the format asked for."""

    exit_code = 7


class NotFinite(OutsizeError):  # noqa: N818
    """A loss or gradient stopped being a number; the run stopped before the update."""

    exit_code = 8


class AdapterError(OutsizeError):
    """The adapter matched nothing, learns nothing, or a file does not fit the model."""

    exit_code = 9


class ConsentMissing(OutsizeError):  # noqa: N818
    """A person who is shown has not agreed, or no longer, or it cannot be told: nothing is done.

    codes: the reasons, each once, as the gate names them.
    """

    exit_code = 10

    def __init__(self, message: str, *, codes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.codes = codes


class MachineFault(OutsizeError):  # noqa: N818
    """The machine did not do what it promised: out of memory, no such device, a dead driver."""

    exit_code = 11
    retries = 3


class Stalled(OutsizeError):  # noqa: N818
    """The card stopped getting anywhere while training: what was saved can be resumed in a fresh process."""

    exit_code = 12
    retries = 3


class LeaseLost(OutsizeError):  # noqa: N818
    """The order that this process worked at was given to another worker: nothing more is written."""

    exit_code = 13
