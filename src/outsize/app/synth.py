"""Random checkpoints in the layout in which real ones are published, to measure with where real ones cannot be had.

Values: matrices normal with a deviation of 0.02, as many models are initialised with; scales of norms one, shifts and
biases zero, running statistics those of normed data. A piece's values depend on the seed, the tensor's name, the piece's
number and the kind of device that made them, and on nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from outsize.base.errors import DoesNotFit, SourceError
from outsize.base.files import write_json_atomically
from outsize.base.progress import OnProgress
from outsize.base.table import TensorSpec
from outsize.base.units import format_bytes
from outsize.families.protocol import FAMILIES, BaseFamily, Published
from outsize.weights import checkpoint_writer
from outsize.weights.checkpoint_writer import NewTensor, Piece, write_checkpoint
from outsize.weights.dtypes import torch_dtype
from outsize.weights.lanes import Lanes

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.families.protocol import ModelFamily

STANDARD_DEVIATION = 0.02
MAX_THREADS = 16  # each holds four pieces at most, on a processor: 2 GiB in all
_MATRIX = "BF16"


@dataclass(frozen=True, slots=True)
class Model:
    """One model to write. folder: where its files go."""

    label: str
    family: ModelFamily
    variant: str
    folder: Path

    @property
    def published(self) -> Published:
        """How it lies in a repository."""
        return self.family.published(self.variant)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written for one model."""

    label: str
    files: tuple[Path, ...]
    num_bytes: int


def models_of(family_name: str, variant: str, path: Path, *, has_parts: bool) -> tuple[Model, ...]:
    """The models to write below a path: a base in its sub-folder, with its conditioners or without; others at the path.

    Raises: RecipeError when there is no such family or variant.
    """
    family = FAMILIES.load(family_name)
    label = f"{family_name}.{variant}"
    family.block_paths(variant)  # refuses a variant that there is not
    if not hasattr(family, "components"):
        return (Model(label, family, variant, path),)
    base = cast("BaseFamily", family)
    own = Model(label, base, variant, path / base.folder)
    if not has_parts:
        return (own,)
    return own, *(
        Model(
            f"{one.family}.{one.variant}", FAMILIES.load(one.family), one.variant, path / one.slot
        )
        for one in base.components(variant)
    )


def synthesise(
    models: Sequence[Model],
    path: Path,
    *,
    seed: int,
    shard_bytes: int,
    device: Device,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[Written]:
    """Write models, and what joins them to a repository.

    Raises: SourceError when there is something at the path already; DoesNotFit when the disk is too small.
    """
    tensors = {model.label: tuple(tensors_of(model.family, model.variant)) for model in models}
    total = sum(one.tensor.num_bytes for several in tensors.values() for one in several)
    _require_room(path, total)
    values = _Values(seed, device.torch_device)
    with _single_threaded():
        written = [
            _write(model, tensors[model.label], values, shard_bytes, on_progress)
            for model in models
        ]
    _join(models, path)
    return written


def _write(
    model: Model,
    tensors: Sequence[_Named],
    values: _Values,
    shard_bytes: int,
    on_progress: Callable[[str, int, int], None] | None,
) -> Written:
    specs = {one.tensor: one.spec for one in tensors}
    files = write_checkpoint(
        model.folder,
        model.published.stem,
        list(specs),
        lambda piece: values.fill(piece, specs[piece.tensor]),
        shard_bytes=shard_bytes,
        num_threads=min(MAX_THREADS, os.cpu_count() or 1),
        progress=_told(on_progress, model.label),
    )
    write_json_atomically(model.folder / "config.json", model.published.config_json)
    return Written(model.label, files, sum(one.num_bytes for one in specs))


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Keep torch from using all cores for each of our threads, which are as many already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor as its file names it, and as our table describes it."""

    tensor: NewTensor
    spec: TensorSpec


def tensors_of(family: ModelFamily, variant: str) -> Iterator[_Named]:
    """All tensors of a variant's published files, under the names of its most common layout."""
    layout = family.layouts(variant)[0]
    prefix = layout.prefixes[0]
    for spec in family.table(variant):
        rule, theirs = layout.rule_of(spec.name)
        assert rule.part == (0, 1), "a repository's own layout fuses nothing"
        yield _Named(NewTensor(prefix + theirs, _dtype(spec), spec.shape), spec)
    for spec in family.published(variant).unread:
        yield _Named(NewTensor(prefix + spec.name, _dtype(spec), spec.shape), spec)


def _dtype(spec: TensorSpec) -> str:
    if spec.role != "buffer":
        return _MATRIX
    return "F32" if spec.shape else "I64"  # running statistics, and the count of batches


class _Values:
    """Makes pieces, in several threads; each thread keeps its buffers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._lanes = Lanes(device)
        self._own = threading.local()

    def fill(self, piece: Piece, spec: TensorSpec) -> memoryview:
        """The bytes of a piece."""
        count, dtype = piece.stop - piece.start, torch_dtype(piece.tensor.dtype)
        host = self._buffer("host", torch.uint8, checkpoint_writer.PIECE_BYTES, is_host=True)
        out = host[: count * dtype.itemsize].view(dtype)
        if len(spec.shape) < 2:
            # of buffers the running variance, and a factor of a whole layer
            is_factor = spec.role == "buffer" and spec.name.endswith(("var", "scalar"))
            is_one = spec.role == "norm" or is_factor
            out.fill_(1 if is_one and not spec.name.endswith("bias") else 0)
        else:
            # fp32 first: torch draws bf16 one by one on a processor
            made = self._buffer("made", torch.float32, checkpoint_writer.PIECE_BYTES // 2)[:count]
            with self._lanes.lane():
                made.normal_(0, STANDARD_DEVIATION, generator=self._generator(piece))
                out.copy_(made.to(dtype) if self._lanes.has_queues else made)
        return out.view(torch.uint8).numpy().data

    def _buffer(
        self, name: str, dtype: torch.dtype, count: int, *, is_host: bool = False
    ) -> torch.Tensor:
        found = getattr(self._own, name, None)
        if found is None:
            if is_host:
                found = self._lanes.host_buffer(count)
            else:
                found = torch.empty(count, dtype=dtype, device=self._device)
            setattr(self._own, name, found)
        return cast("torch.Tensor", found)

    def _generator(self, piece: Piece) -> torch.Generator:
        made = getattr(self._own, "generator", None)
        if made is None:
            made = self._own.generator = torch.Generator(self._device)
        text = f"{self._seed}/{piece.tensor.name}/{piece.number}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        return cast("torch.Generator", made.manual_seed(number))


def _require_room(path: Path, num_bytes: int) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SourceError(f"{path} holds something already; name a new folder, or empty that one")
    path.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path).free
    if num_bytes > free:
        raise DoesNotFit(
            f"the checkpoint needs {format_bytes(num_bytes)}, the disk of {path} has {format_bytes(free)} free; free "
            "some, name a folder on another disk, or a variant of less depth"
        )


def _join(models: Sequence[Model], path: Path) -> None:
    """Write model_index.json and the scheduler of a base; nothing for a model by itself."""
    published = models[0].published
    if not published.pipeline:
        return
    entries: dict[str, object] = {"_class_name": published.pipeline}
    scheduler = dict(published.scheduler)
    entries["scheduler"] = [published.library, scheduler["_class_name"]]
    for model in models:
        entries[model.folder.name] = [model.published.library, model.published.upstream]
    write_json_atomically(path / "scheduler" / "scheduler_config.json", scheduler)
    write_json_atomically(path / "model_index.json", entries)


def _told(on_progress: Callable[[str, int, int], None] | None, label: str) -> OnProgress | None:
    if on_progress is None:
        return None
    return lambda done, total: on_progress(label, done, total)
