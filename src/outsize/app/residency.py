"""What is looked at while a training runs: the card's sensors all the time, and where memory lies when it matters.

Where memory lies is proved after loading, when somebody asks, and when a step is slow.

The verdict is written to the journal. What is known to be away after loading ends the training before it has begun: its
numbers would be right, but each step many times slower. Later it is told, and training goes on.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from outsize.app.meter import copied_bytes_of
from outsize.app.sensing import Sampler
from outsize.devices._ledger import Piece, ledger_of, owners_of
from outsize.devices._open_sensors import open_sensors
from outsize.doctor.residency import Proof, prove
from outsize.placement.protocol import Lists

if TYPE_CHECKING:
    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.layers.model import FrozenModel
    from outsize.runs.requests import Requests
    from outsize.train.loop import StepReport
    from outsize.train.update import Update

Moment = Literal["loaded", "asked", "slow step"]
BLOCKS, SMALL, ADAPTER, OPTIMISER = "blocks", "small tensors", "adapter", "optimiser"

_SLOW = 2.0  # medians
_FEWEST_STEPS = 8  # from which a median says something
_MOST_STEPS = 64  # of which it is taken
_AGAIN_S = 60.0  # between two proofs for slow steps: where one is slow many may be


class Residency:
    """Looks at one training; made after its clock, which may stand before the placement."""

    def __init__(
        self,
        site: Site,
        model: FrozenModel,
        adapter: Adapter,
        update: Update,
        requests: Requests,
    ) -> None:
        self._site, self._requests = site, requests
        self._model, self._adapter, self._update = model, adapter, update
        self._reader = open_sensors(site.device.card)
        self._sampler = Sampler(site.device, site.journal, self._reader, copied_bytes_of(model))
        self._seconds: deque[float] = deque(maxlen=_MOST_STEPS)
        self._quiet_until_s = 0.0

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Prove what was loaded, before the first step; within the block the sensors are read.

        Raises: MachineFault naming what is not on the card.
        """
        self._sampler.step = step
        proof = self._prove("loaded", step)
        proof.require()
        self._warn(proof)
        with self._sampler:
            yield

    def see(self, report: StepReport) -> None:
        """After a step: prove where that was asked for, or the step was slow."""
        self._sampler.step = report.step
        if not self._seconds:  # the optimiser's memory came with it
            self._sampler.owners = owners_of(self._pieces())
        if self._requests.take_proof():
            self._site.progress.say(str(self._prove("asked", report.step)))
        elif self._is_slow(report.seconds) and time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + _AGAIN_S
            self._warn(self._prove("slow step", report.step))
        self._seconds.append(report.seconds)

    def _is_slow(self, seconds: float) -> bool:
        if not self._site.device.has_own_memory or len(self._seconds) < _FEWEST_STEPS:
            return False
        return seconds > _SLOW * statistics.median(self._seconds)

    def _prove(self, moment: Moment, step: int) -> Proof:
        pieces = self._pieces()
        self._sampler.owners = owners_of(pieces)
        listed = self._sampler.owners.get(BLOCKS, 0)
        rates = self._site.plan.rates
        proof = prove(
            pieces,
            self._site.device,
            self._reader,
            rate_bytes_per_s=rates.device_memory_bytes_per_s,
            bus_bytes_per_s=rates.bus_bytes_per_s,
            unlisted_bytes=max(0, self._model.placement.device_bytes() - listed),
        )
        self._site.journal.write("residency", moment=moment, step=step, **proof.to_json())
        return proof

    def _warn(self, proof: Proof) -> None:
        if not proof.is_well:
            self._site.progress.say(f"warning: {proof}")

    def _pieces(self) -> list[Piece]:
        placement = self._model.placement
        blocks = placement.buffers() if isinstance(placement, Lists) else {}
        return ledger_of(
            {
                BLOCKS: blocks.items(),
                OPTIMISER: self._update.held().items(),
                ADAPTER: self._adapter.parameters().items(),
                SMALL: self._model.small_tensors().items(),
            }
        )
