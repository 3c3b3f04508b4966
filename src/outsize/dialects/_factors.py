"""The factors of adapters as keys of a file, and their scale folded into B.

Every client names a factor `<prefix><module>.<factor>.weight`; they differ in prefix and spelling only. Reading accepts
both spellings in use and the kohya convention of a scalar `<module>.alpha`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outsize.base.errors import AdapterError
from outsize.dialects.protocol import AdapterFile, AdapterWeights, LoraPair, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

_FACTOR = {"lora_A": "A", "lora_B": "B", "lora_down": "A", "lora_up": "B"}
_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?P<factor>lora_A|lora_B|lora_down|lora_up)\.weight|(?P<alpha>alpha))"
)
RANK_KEY = "outsize.rank"  # of the metadata that export writes


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


def read_factors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, LoraPair]:
    """Gather the factors of all modules, a module's own alpha multiplied into its B.

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
        role = _FACTOR[match["factor"]] if match["factor"] else "alpha"
        parts = found.setdefault(match["module"], {})
        if role in parts:
            faults.append(f"{key}: factor {role} is there twice")
        parts[role] = tensor
    pairs: dict[str, LoraPair] = {}
    for module, parts in found.items():
        missing = [role for role in ("A", "B") if role not in parts]
        if missing:
            faults.append(f"{module}: factor {' and '.join(missing)} missing")
            continue
        try:
            pairs[module] = _with_own_alpha(LoraPair(parts["A"], parts["B"]), parts.get("alpha"))
        except AdapterError as error:
            faults.append(f"{module}: {error}")
    refuse_all(faults)
    return pairs


def _with_own_alpha(pair: LoraPair, alpha: Tensor | None) -> LoraPair:
    if alpha is None:
        return pair
    if alpha.numel() != 1:
        raise AdapterError(f"alpha has shape {tuple(alpha.shape)}; it must be one number")
    return scaled(pair, float(alpha) / pair.rank)


def scaled(pair: LoraPair, factor: float) -> LoraPair:
    """Multiply a factor into B, rounded once to B's dtype (exact for powers of two short of its range's ends)."""
    if factor == 1.0:
        return pair
    return LoraPair(pair.A, (pair.B.double() * factor).to(pair.B.dtype))


def with_baked_scale(adapter: AdapterWeights) -> dict[str, LoraPair]:
    """Multiply alpha / rank into each B: files without alpha are read with scale 1."""
    return {module: scaled(pair, adapter.scale) for module, pair in adapter.pairs.items()}


def unscaled_adapter(pairs: Mapping[str, LoraPair], metadata: Mapping[str, str]) -> AdapterWeights:
    """Make an adapter of pairs whose scale is 1: its alpha is its rank, as stated by our metadata or most common."""
    if not pairs:
        raise AdapterError("the file holds no factors of an adapter")
    stated = metadata.get(RANK_KEY, "")
    common = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    rank = int(stated) if stated.isdecimal() and int(stated) > 0 else common
    return AdapterWeights(pairs, rank, float(rank))


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
