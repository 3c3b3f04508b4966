"""The factors of adapters as keys of a file, and their scale: in B, or as a scalar beside each pair.

Every client names a factor `<prefix><module>.<factor>.weight`; they differ in prefix and spelling only. Reading accepts
both spellings in use and the kohya convention of a scalar `<module>.alpha`, by which a pair counts alpha / its own rank.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outsize.base.errors import AdapterError
from outsize.base.layout import Layout
from outsize.dialects.protocol import AdapterFile, AdapterWeights, LoraPair, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

_FACTOR = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_down": "A",
    "lora_up": "B",
    "alpha": "alpha",
    "lora_magnitude_vector": "lengths",
}
_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?P<factor>lora_A|lora_B|lora_down|lora_up)\.weight"
    r"|(?P<other>alpha|lora_magnitude_vector))"
)
RANK_KEY, ALPHA_KEY = "outsize.rank", "outsize.alpha"  # of the metadata that export writes
_SAME_SCALE = 1e-6  # relative: a scalar alpha is rounded to fp32 by whoever writes it
ADAPTER_FILE = "adapter.safetensors"


@dataclass(frozen=True, slots=True)
class Scaled:
    """Pairs by module, each with what its product is multiplied with; with DoRA the lengths of rows (N)."""

    pairs: Mapping[str, LoraPair]
    scales: Mapping[str, float]
    lengths: Mapping[str, Tensor] = field(default_factory=dict)


def write_factors(
    pairs: Mapping[str, LoraPair], prefix: str, names: tuple[str, str] = ("lora_A", "lora_B")
) -> dict[str, Tensor]:
    """Name the factors: "<prefix><module>.<name>.weight", contiguous, sorted by key."""
    a_name, b_name = names
    tensors: dict[str, Tensor] = {}
    for module, pair in sorted(pairs.items()):
        tensors[f"{prefix}{module}.{a_name}.weight"] = pair.A.contiguous()
        tensors[f"{prefix}{module}.{b_name}.weight"] = pair.B.contiguous()
    return tensors


def write_lengths(adapter: AdapterWeights, prefix: str) -> dict[str, Tensor]:
    """DoRA's lengths of rows as PEFT and diffusers name them."""
    return {
        f"{prefix}{module}.lora_magnitude_vector": one.contiguous()
        for module, one in sorted(adapter.lengths.items())
    }


def write_scaled(
    pairs: Mapping[str, LoraPair], scale: float, prefix: str, names: tuple[str, str]
) -> dict[str, Tensor]:
    """As write_factors, with a scalar `<prefix><module>.alpha` (fp32) of scale x the pair's own rank."""
    import torch

    tensors = write_factors(pairs, prefix, names)
    for module, pair in pairs.items():
        tensors[f"{prefix}{module}.alpha"] = torch.tensor(scale * pair.rank, dtype=torch.float32)
    return dict(sorted(tensors.items()))


def read_factors(tensors: Mapping[str, Tensor], prefix: str) -> Scaled:
    """Gather the factors of all modules, and alpha / rank of those with an alpha of their own; else 1.

    Raises: AdapterError naming every key without the prefix or of unknown kind, every module with a factor missing and
    every pair whose shapes do not fit.
    """
    found: dict[str, dict[str, Tensor]] = {}
    faults: list[str] = []
    for key, tensor in sorted(tensors.items()):
        match = _KEY.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match is None:
            faults.append(f"{key}: not a key of this kind of file")
            continue
        role = _FACTOR[match["factor"] or match["other"]]
        parts = found.setdefault(match["module"], {})
        if role in parts:
            faults.append(f"{key}: factor {role} is there twice")
        parts[role] = tensor
    pairs: dict[str, LoraPair] = {}
    scales: dict[str, float] = {}
    for module, parts in found.items():
        missing = [role for role in ("A", "B") if role not in parts]
        if missing:
            faults.append(f"{module}: factor {' and '.join(missing)} missing")
            continue
        try:
            pairs[module] = LoraPair(parts["A"], parts["B"])
            scales[module] = _own_scale(pairs[module], parts.get("alpha"))
        except AdapterError as error:
            faults.append(f"{module}: {error}")
    refuse_all(faults)
    lengths = {module: one["lengths"] for module, one in found.items() if "lengths" in one}
    return Scaled(pairs, scales, lengths)


def _own_scale(pair: LoraPair, alpha: Tensor | None) -> float:
    if alpha is None:
        return 1.0
    if alpha.numel() != 1:
        raise AdapterError(f"alpha has shape {tuple(alpha.shape)}; it must be one number")
    if pair.rank == 0:
        raise AdapterError("its rank is 0")
    return float(alpha) / pair.rank


def num_claimed(keys: Iterable[str], prefix: str) -> int:
    """How many keys are those of factors below a prefix."""
    return sum(
        key.startswith(prefix) and _KEY.fullmatch(key.removeprefix(prefix)) is not None
        for key in keys
    )


def scaled(pair: LoraPair, factor: float) -> LoraPair:
    """Multiply a factor into B, rounded once to B's dtype (exact for powers of two short of its range's ends)."""
    if factor == 1.0:
        return pair
    return LoraPair(pair.A, (pair.B.double() * factor).to(pair.B.dtype))


def with_baked_scale(adapter: AdapterWeights) -> dict[str, LoraPair]:
    """Multiply alpha / rank into each B: files without alpha are read with scale 1."""
    return {module: scaled(pair, adapter.scale) for module, pair in adapter.pairs.items()}


def adapter_of(found: Scaled, metadata: Mapping[str, str]) -> AdapterWeights:
    """An adapter of pairs that each have a scale.

    Its rank is that of our metadata, or the most common one. Where all scales are the same, it is the adapter's and B is
    as the file has it; else each is multiplied into its B and alpha is the rank.
    """
    pairs = found.pairs
    if not pairs:
        raise AdapterError("the file holds no factors of an adapter")
    stated = metadata.get(RANK_KEY, "")
    common = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    rank = int(stated) if stated.isdecimal() and int(stated) > 0 else common
    scale = next(iter(found.scales.values()))
    if any(not math.isclose(one, scale, rel_tol=_SAME_SCALE) for one in found.scales.values()):
        baked = {module: scaled(pair, found.scales[module]) for module, pair in pairs.items()}
        return AdapterWeights(baked, rank, float(rank), found.lengths)
    alpha = _unrounded(scale * rank, metadata.get(ALPHA_KEY, ""))
    return AdapterWeights(pairs, rank, alpha, found.lengths)


def _unrounded(alpha: float, stated: str) -> float:
    """Alpha as our metadata states it, where the file's own scalars are that, rounded to fp32."""
    try:
        exact = float(stated)
    except ValueError:
        return alpha
    return exact if math.isclose(exact, alpha, rel_tol=_SAME_SCALE) else alpha


def tensor_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, AdapterFile]:
    """The one file of a dialect that is no folder."""
    return {ADAPTER_FILE: TensorFile(tensors, dict(metadata))}


def original_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout of the checkpoint that a family was first published as: the first that renames or fuses anything.

    Raises: AdapterError when there is none.
    """
    for layout in layouts:
        if layout.rules:
            return layout
    names = ", ".join(layout.name for layout in layouts) or "none"
    raise AdapterError(
        f"this family has no layout of an original checkpoint (layouts: {names}), so there are no names for such keys; "
        "export to another dialect, as the family's models are run elsewhere"
    )


def only_tensor_file(files: Mapping[str, AdapterFile]) -> TensorFile:
    """The one safetensors file of a dialect that is no folder.

    Raises: AdapterError when there is another number of files, or another kind.
    """
    if len(files) != 1 or not isinstance(file := next(iter(files.values())), TensorFile):
        raise AdapterError(
            f"expected one safetensors file, got {', '.join(sorted(files)) or 'none'}"
        )
    return file


def refuse_all(faults: list[str]) -> None:
    """Raise one AdapterError that names everything that is wrong, if anything is."""
    if faults:
        lines = "\n  ".join(faults)
        raise AdapterError(
            f"{len(faults)} fault{'s' * (len(faults) > 1)} in the adapter:\n  {lines}"
        )
