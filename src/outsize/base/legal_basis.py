"""On what ground somebody's pictures or texts are used: a typed field, wherever it is stated."""

from __future__ import annotations

from typing import Literal, get_args

LegalBasis = Literal["consent", "public_domain", "own_work", "licence"]
BASES: tuple[LegalBasis, ...] = get_args(LegalBasis)
