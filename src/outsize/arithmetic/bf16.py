"""Products in the device's compute type, whatever it is: bf16 on cards, fp32 on processors."""

from __future__ import annotations

from outsize.arithmetic._compute_type import ComputeType

plugin = ComputeType()
