"""Token table and head in host memory: loaded there, read from there, given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from language_support import NAMES
from run_support import checkpoint_bytes, train_here
from text_run_support import write_language, write_text_recipe

from outsize.app import models, site
from outsize.layers import loading
from outsize.plan.sizes import vocabulary_tensors


@pytest.mark.parametrize("family", NAMES)
def test_training_is_the_same_wherever_the_vocabulary_lies(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a card: what lies outside the blocks is read into host memory, which is given back at the end."""
    model = write_language(tmp_path / "model", family)
    names = vocabulary_tensors(family, "tiny")
    found, lent = [], []
    for on_host in (False, True):
        if on_host:
            for module in (models, site):
                monkeypatch.setattr(module, "vocabulary_on_host", lambda *_: names)
            closing = loading.Loading.finish_into_

            def finish(self: loading.Loading, into: object, closing: object = closing) -> None:
                lent.append(self._outside)
                closing(self, into)  # type: ignore[operator]

            monkeypatch.setattr(loading.Loading, "finish_into_", finish)
        recipe = write_text_recipe(
            tmp_path, family, model=model, name=f"host-{on_host}", train={"steps": 3}
        )
        _, run = train_here(recipe)
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    (buffer,) = lent
    assert buffer is not None
    assert buffer.taken_bytes == 0, "it was given back"
