"""A training that begins from an adapter in a file, of whatever program, with the very delta that it has.

The recipe's own scale stays: what differs is multiplied into B, in fp32. Of a file of lower rank the further rows of A keep
their initial values and the further columns of B are zero, so that the delta is the file's and more can be learned.

Dimensions: r rank, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from outsize.app.adapter_files import Found, fused_with, read_adapter
from outsize.base.errors import AdapterError
from outsize.plan.names import base_family
from outsize.runs.checkpoint import newest_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.runs.folder import RunFolder


def begin_from_file_(
    site: Site, run: RunFolder, adapter: Adapter, initial: dict[str, Tensor]
) -> None:
    """Give a fresh adapter, and its initial values, those of the recipe's file; nothing where a checkpoint is resumed.

    initial: "<module path>.lora_A" (r, K) and ".lora_B" (N, r), fp32, on the host; changed in place.
    Raises: AdapterError when the file is of another base, or naming every module that it lacks, has beside those that are
    trained, or has of a higher rank.
    """
    start = site.recipe.adapter.start
    if start is None or newest_checkpoint(run.checkpoints)[0] is not None:
        return
    base = site.recipe.base
    found = read_adapter(start, base.family, base.variant)
    if site.recipe.adapter.kind != "lora":
        raise AdapterError(
            f"adapter.start is for kind: lora; lengths of rows would bring the weights with {start} in them back to the base's"
        )
    layouts = base_family(base.family).layouts(base.variant)
    missing = [path for path in adapter.paths if path not in found.weights.pairs]
    zero = {path for path in missing if fused_with(path, found.weights.pairs, layouts)}
    faults = list(_faults(found, adapter, initial, zero))
    if faults:
        listed = "\n  ".join(faults)
        raise AdapterError(
            f"{start} is not of the shape that the recipe trains; change adapter.rank, roles or ranks, or `outsize resize` "
            f"it:\n  {listed}"
        )
    num_grown = _fill_(found, adapter, initial, zero)
    adapter.load_(initial)
    site.journal.write(
        "started_from", sha256=found.digest, dialect=found.dialect, modules=len(found.weights.pairs),
        zero=sorted(zero), grown=num_grown,
    )  # fmt: skip
    more = f", {num_grown} of them given a higher rank" if num_grown else ""
    site.progress.say(
        f"adapter: begins from {start.name} ({found.dialect}, {len(found.weights.pairs)} modules{more})"
    )


def _faults(
    found: Found, adapter: Adapter, initial: Mapping[str, Tensor], zero: set[str]
) -> Iterator[str]:
    pairs, trained = found.weights.pairs, set(adapter.paths)
    for path in adapter.paths:
        if path not in pairs and path not in zero:
            yield f"{path} is trained, and not in the file"
    for path, pair in pairs.items():
        if path not in trained:
            yield f"{path} is in the file, and not trained"
        elif pair.rank > (rank := initial[f"{path}.lora_A"].shape[0]):
            yield f"{path} has rank {pair.rank} in the file, {rank} in the recipe"


def _fill_(found: Found, adapter: Adapter, initial: dict[str, Tensor], zero: set[str]) -> int:
    """Change the initial values; how many modules have a higher rank than in the file."""
    num_grown = 0
    for path in adapter.paths:
        A, B = initial[f"{path}.lora_A"], initial[f"{path}.lora_B"]
        if path in zero:
            continue  # B is zero already
        pair = found.weights.pairs[path]
        factor = found.weights.scale / adapter.scale_of(path)
        num_grown += pair.rank < A.shape[0]
        A[: pair.rank] = pair.A.float()
        B[:, : pair.rank] = (pair.B.double() * factor).to(torch.float32)
    return num_grown
