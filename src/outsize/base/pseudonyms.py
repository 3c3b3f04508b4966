"""Pseudonyms: ids of people that say nothing about them.

A subject is somebody who is shown (s-7f3a9c21d0b4), a party somebody who asks or is named in a grant (p-0c11d2e93a5f). Ids are
made at random; whose they are stands on paper, outside this program. The pattern leaves no room for a name or an address.
"""

from __future__ import annotations

import re
import secrets
from typing import Literal

Kind = Literal["s", "p"]

_PATTERN = re.compile(r"(?P<kind>[sp])-[0-9a-f]{12}")
_NOUNS = {"s": "subject", "p": "party"}


def new_pseudonym(kind: Kind) -> str:
    """A fresh id."""
    return f"{kind}-{secrets.token_hex(6)}"


def is_pseudonym(text: object, *kinds: Kind) -> bool:
    """Whether a value is an id of one of the kinds."""
    found = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    return found is not None and found["kind"] in kinds


def pseudonym_fault(text: str, *kinds: Kind) -> str | None:
    """What is wrong with an id, for the person who wrote it; None when nothing is."""
    if is_pseudonym(text, *kinds):
        return None
    wanted = " or ".join(f"{kind}- and 12 of 0-9 and a-f for a {_NOUNS[kind]}" for kind in kinds)
    makers = " or ".join(f"`outsize registry {_NOUNS[kind]} add`" for kind in kinds)
    return f"{text!r} is no pseudonym: {wanted}, as {makers} makes; names and addresses stay outside this program"
