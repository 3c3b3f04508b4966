"""Whether a device can multiply in 8 bits is found out by multiplying there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.arithmetic import fp8
from outsize.arithmetic.protocol import ARITHMETICS


def test_processors_have_none() -> None:
    assert fp8.plugin.fault(torch.device("cpu")) == "processors have no 8-bit floats"
    assert ARITHMETICS.load("bf16").fault(torch.device("cpu")) is None


class Card:
    """Stands for a card; what is moved there stays on the processor."""

    type, index = "cuda", 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    to = Tensor.to

    def moved(self: Tensor, *given: Any, **named: Any) -> Tensor:
        return self if given and isinstance(given[0], Card) else to(self, *given, **named)

    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some card")
    return Card()


def test_a_card_that_multiplies_rightly_has_no_fault(card: Any) -> None:
    assert fp8._find_fault(card) is None


def test_a_card_that_multiplies_wrongly_is_found_out(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check multiplies; a name and a version prove nothing."""
    right = fp8._product
    monkeypatch.setattr(fp8, "_product", lambda *given: right(*given) * 1.2)
    assert "an e4m3 product was off by 2" in (fp8._find_fault(card) or "")  # 20 % and some


def test_a_torch_that_refuses_is_quoted(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise RuntimeError("not\n compiled in")

    monkeypatch.setattr(fp8, "_product", refuse)
    assert (fp8._find_fault(card) or "").endswith("refused an e4m3 product: not compiled in")


def test_a_card_from_before_ada_is_told_apart_by_its_capability(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert (fp8._find_fault(card) or "").startswith("Some card has no e4m3 units")
