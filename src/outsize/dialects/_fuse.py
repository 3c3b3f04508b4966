"""From our modules to the modules of another layout and back, for low-rank pairs.

Several of our modules may be row slabs of one of theirs (q, k and v of a fused qkv), and one of ours may have its two
row halves swapped. A pair of theirs is made of pairs of ours by placing B's rows where the layout says:

    A = cat(A_1 ... A_n)          (sum of r, K)
    B = block_diag(B_1 ... B_n)   (sum of N, sum of r), the blocks at the rows of their slabs

so B @ A has exactly the rows B_i @ A_i, added zeros changing nothing. A slab whose module carries no adapter has zero
rows and takes no columns. The way back is exact for every file: rows are cut out, and columns that are zero in all the
rows of a part are left out, so block-diagonal files give back the pairs they were made of and dense ones (as other
trainers write them) give every part the whole A.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from outsize.base.layout import Layout, Slab
from outsize.dialects._factors import Scaled, refuse_all
from outsize.dialects.protocol import LoraPair

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[LoraPair, tuple[Slab, ...]]
_WEIGHT = ".weight"


def fuse(pairs: Mapping[str, LoraPair], layout: Layout) -> dict[str, LoraPair]:
    """Rename and fuse pairs by module path into pairs by their module path.

    Raises: AdapterError naming every module that the layout does not cover, and every fused module whose parts have
    different inputs or rows that do not make up one matrix.
    """
    groups: dict[str, dict[str, Part]] = {}
    faults: list[str] = []
    for module, pair in pairs.items():
        try:
            slabs = layout.slabs(module + _WEIGHT)
        except KeyError:
            faults.append(f"{module}: layout {layout.name!r} has no place for it")
            continue
        groups.setdefault(slabs[0].tensor.removesuffix(_WEIGHT), {})[module] = (pair, slabs)
    fused: dict[str, LoraPair] = {}
    for theirs, parts in groups.items():
        fault = _cannot_fuse(parts)
        if fault is None:
            fused[theirs] = _fuse_parts(sorted(parts.values(), key=lambda part: _edges(part[1][0])))
        else:
            faults.append(f"{', '.join(parts)}: {fault}")
    refuse_all(faults)
    return fused


def split(theirs: Mapping[str, LoraPair], layout: Layout) -> dict[str, LoraPair]:
    """Take pairs of theirs apart into pairs by our module path; parts that are zero may be left out.

    Raises: AdapterError naming every module that the layout does not know and every B whose rows do not divide.
    """
    ours: dict[str, LoraPair] = {}
    faults: list[str] = []
    for module, pair in theirs.items():
        slabs = {
            name.removesuffix(_WEIGHT): layout.slabs(name)
            for name in layout.ours_of(module + _WEIGHT)
        }
        if not slabs:
            faults.append(f"{module}: layout {layout.name!r} knows no such module")
        elif sum(_share(of_part) for of_part in slabs.values()) != 1:
            faults.append(f"{module}: layout {layout.name!r} covers only some of its rows")
        elif not _is_divisible(pair.B.shape[0], slabs.values()):
            faults.append(f"{module}: {pair.B.shape[0]} rows do not divide into {', '.join(slabs)}")
        else:
            ours.update(_split_pair(pair, slabs))
    refuse_all(faults)
    return ours


def split_scaled(found: Scaled, layout: Layout) -> Scaled:
    """As `split`, for pairs with scales: a part has the scale of the whole.

    Raises: as `split`; AdapterError for lengths of rows (DoRA), which no client has under such names.
    """
    refuse_all([f"{module}.lora_magnitude_vector: unknown here" for module in found.lengths])
    pairs = split(found.pairs, layout)
    whole = {module: layout.rule_of(module + _WEIGHT)[1].removesuffix(_WEIGHT) for module in pairs}
    return Scaled(pairs, {module: found.scales[theirs] for module, theirs in whole.items()})


def _edges(slab: Slab) -> tuple[Fraction, Fraction]:
    return Fraction(*slab.start), Fraction(*slab.stop)


def _share(slabs: Sequence[Slab]) -> Fraction:
    """The fraction of the rows of theirs that one of ours takes."""
    return sum((stop - start for start, stop in map(_edges, slabs)), Fraction(0))


def _is_divisible(num_rows: Fraction | int, parts: Iterable[Sequence[Slab]]) -> bool:
    return all(
        (edge * num_rows).denominator == 1
        for slabs in parts
        for slab in slabs
        for edge in _edges(slab)
    )


def _num_rows(part: Part) -> Fraction:
    """How many rows the whole matrix has, by one part's B."""
    pair, slabs = part
    return pair.B.shape[0] / _share(slabs)


def _cannot_fuse(parts: Mapping[str, Part]) -> str | None:
    inputs = sorted({pair.A.shape[1] for pair, _ in parts.values()})
    if len(inputs) > 1:
        return f"fused modules share one input, these take {inputs}"
    rows = {_num_rows(part) for part in parts.values()}
    whole = next(iter(rows))
    if len(rows) > 1 or not _is_divisible(whole, [slabs for _, slabs in parts.values()]):
        return f"their outputs {[pair.B.shape[0] for pair, _ in parts.values()]} do not make up one matrix"
    return None


def _fuse_parts(parts: Sequence[Part]) -> LoraPair:
    import torch

    num_rows = int(_num_rows(parts[0]))
    B = torch.zeros(num_rows, sum(pair.rank for pair, _ in parts), dtype=parts[0][0].B.dtype)
    column = 0
    for pair, slabs in parts:
        row = 0
        for slab in slabs:
            start, stop = slab.rows(num_rows)
            B[start:stop, column : column + pair.rank] = pair.B[row : row + stop - start]
            row += stop - start
        column += pair.rank
    return LoraPair(torch.cat([pair.A for pair, _ in parts]), B)


def _split_pair(pair: LoraPair, slabs_of: Mapping[str, Sequence[Slab]]) -> dict[str, LoraPair]:
    import torch

    windows = {
        module: [slab.rows(pair.B.shape[0]) for slab in slabs] for module, slabs in slabs_of.items()
    }
    rows = {
        module: torch.cat([pair.B[start:stop] for start, stop in of_part])
        for module, of_part in windows.items()
    }
    if len(rows) == 1:
        return {module: LoraPair(pair.A, B) for module, B in rows.items()}
    ordered = sorted(rows, key=lambda module: windows[module][0])
    columns = _columns([rows[module] for module in ordered])
    return {
        module: LoraPair(pair.A[start:stop].clone(), rows[module][:, start:stop].clone())
        for module, (start, stop) in zip(ordered, columns, strict=True)
        if stop > start
    }


def _columns(parts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The columns [start, stop) that each part needs, empty for a part left out.

    Equal blocks in order where they hold all that is not zero (first as if all parts were there, then as if only those
    that are not zero), else from a part's first to its last column that is not zero.
    """
    rank = parts[0].shape[1]
    needed = [_support(part) for part in parts]
    present = [j for j, (start, stop) in enumerate(needed) if stop > start]
    for members in (list(range(len(parts))), present):
        if members and rank % len(members) == 0:
            width = rank // len(members)
            blocks = {j: (place * width, (place + 1) * width) for place, j in enumerate(members)}
            if all(blocks[j][0] <= needed[j][0] and needed[j][1] <= blocks[j][1] for j in present):
                return [blocks.get(j, (0, 0)) for j in range(len(parts))]
    return needed


def _support(part: Tensor) -> tuple[int, int]:
    used = (part != 0).any(dim=0).nonzero().flatten().tolist()
    return (used[0], used[-1] + 1) if used else (0, 0)
