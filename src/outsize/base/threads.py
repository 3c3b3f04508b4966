"""How torch's threads wait for each other, settled before torch is imported.

Threads that spin without end stall each other when another program uses a core; threads that sleep at once lose more at
every small operation than a second core gives. A short spin does neither. Measured on two cores, a training step of the
teaching base (8 pictures): 0.46 s with no spin, 0.33 s with 10,000 turns, 0.39 s on one thread.
"""

from __future__ import annotations

import os

SPIN_TURNS = 10_000


def settle_threads() -> None:
    """Set what the environment leaves open; without effect once torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_TURNS))
