"""When previews become pictures: beside the base where there is room, else once it is gone.

The placement of the base is never changed for a decoder that runs now and then, unless the recipe insists
(`previews.decode: now`): latents are small, and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outsize.base.units import format_bytes
from outsize.plan import estimate
from outsize.plan.compute import Compute
from outsize.plan.pools import Holding, Phase
from outsize.plan.work import Work


def drafted(work: Work, holding: Holding, compute: Compute) -> Iterator[Phase]:
    """The phases that a placement must have room for."""
    if not work.demand.preview_tokens:
        return
    yield estimate.previewing(work, holding, compute)
    if work.demand.preview_decode == "now":
        yield estimate.decoding_beside(work, holding, compute)


def settled(
    phases: tuple[Phase, ...],
    work: Work,
    holding: Holding,
    compute: Compute,
    fits: Callable[[tuple[Phase, ...]], bool],
) -> tuple[Phase, ...]:
    """All phases, decoding among them where a recipe leaves open when. fits: whether phases stay within the budget."""
    decode = work.demand.preview_decode
    if not work.demand.preview_tokens or decode in {None, "now"}:
        return phases
    beside = estimate.decoding_beside(work, holding, compute)
    is_now = decode == "auto" and fits((beside,))
    place = 1 + next(i for i, phase in enumerate(phases) if phase.name == estimate.PREVIEW)
    chosen = beside if is_now else estimate.decoding_after(work)
    return (*phases[:place], chosen, *phases[place:])


def notes(work: Work, phases: tuple[Phase, ...]) -> Iterator[str]:
    """When previews are decoded, and why not at once."""
    chosen = next((phase for phase in phases if phase.name == estimate.DECODE), None)
    if chosen is None:
        return
    if chosen.holding is not None:
        yield "previews are decoded as they are made, with the image codec beside the base"
        return
    need = sum(item.num_bytes for item in work.demand.decoding(work))
    why = "as the recipe says"
    if work.demand.preview_decode == "auto":
        why = f"beside the base the image codec would want {format_bytes(need)} more"
    yield f"previews are kept as latents and decoded when training is over or stopped: {why}"
