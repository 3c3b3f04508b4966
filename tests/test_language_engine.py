"""The language families in the engine against transformers and peft: outputs, gradients, packed rows, generating."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase, make_tiny
from language_support import (
    FP32,
    NAMES,
    attach,
    logits_of,
    loss_of,
    rows,
    separate,
    upstream_model,
)
from torch import Tensor

from outsize.families._language import vectors_from_host
from outsize.layers.compiled import BlockCompiler

LONG = 40  # several windows of the tiny Gemma


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyBase]:
    root = tmp_path_factory.mktemp("bases")
    return {name: make_tiny(root / name, name, FP32) for name in NAMES}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, in the norm."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_logits_are_those_of_transformers(
    bases: dict[str, TinyBase], name: str, placement: str
) -> None:
    """Rows of one document, over whole blocks of our engine, against the class that transformers itself makes."""
    base, batch = bases[name], rows([[LONG], [LONG]])
    model, upstream = base.open(placement), upstream_model(name, base.decoded())
    with torch.no_grad():
        model.begin("forward")
        ours = logits_of(base, model.module, batch)
        theirs = upstream(input_ids=batch["input_ids"], use_cache=False).logits
    assert theirs.std() > 0.1, "a model without effect would pass every comparison"
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_adapter_gradients_are_those_of_transformers_and_peft(
    bases: dict[str, TinyBase], name: str
) -> None:
    """Every role is adapted, linear attention too; transformers shifts the labels itself."""
    from peft import LoraConfig, get_peft_model

    base, batch = bases[name], rows([[LONG], [LONG]])
    model = base.open("stream")
    adapter = attach(base, model)
    ours = loss_of(base, model, batch)
    ours.backward()  # type: ignore[no-untyped-call]
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules="|".join(map(re.escape, adapter.paths)))
    theirs: Any = get_peft_model(upstream_model(name, base.decoded()), config)
    state = {f"base_model.model.{key}": one for key, one in adapter.parameters().items()}
    named = {
        key.replace(".default.weight", ""): one
        for key, one in theirs.named_parameters()
        if one.requires_grad
    }
    assert named.keys() == state.keys()
    with torch.no_grad():
        for key, one in named.items():
            one.copy_(state[key])
    loss = theirs(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    for key, one in named.items():
        assert one.grad is not None
        assert state[key].grad is not None, key
        assert distance(state[key].grad, one.grad) < 1e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_resident_bit_for_bit(bases: dict[str, TinyBase], name: str) -> None:
    """Packed rows, loss and every gradient."""
    found = []
    for placement in ("resident", "stream"):
        model = bases[name].open(placement)
        adapter = attach(bases[name], model)
        loss = loss_of(bases[name], model, rows([[5, 13, 9], [27]]))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(one.grad for one in adapter.parameters().values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_a_row_do_not_see_each_other(bases: dict[str, TinyBase], name: str) -> None:
    """Each is what it is as a row of its own, beside padding as well; so are the gradients."""
    base, batch = bases[name], rows([[11, 1, 19], [3, 25, 3]], padding=5)
    model = base.open("resident")
    adapter = attach(base, model)
    packed = loss_of(base, model, batch)
    packed.backward()  # type: ignore[no-untyped-call]
    grads = {key: one.grad for key, one in adapter.parameters().items()}
    for one in adapter.parameters().values():
        one.grad = None
    logits = logits_of(base, model.module, batch).detach()
    counts, alone = [], []
    num_trained = int((batch["labels"] >= 0).sum())
    for document in separate(batch):
        model.begin("train")
        own = logits_of(base, model.module, document)
        loss = torch.nn.functional.cross_entropy(
            own.flatten(0, 1), document["labels"].flatten(), reduction="sum"
        )
        (loss / num_trained).backward()  # type: ignore[no-untyped-call]
        alone.append(own.detach()[0])
        counts.append(loss.item())
    assert distance(logits[batch["segments"] >= 0], torch.cat(alone)) < 1e-5
    assert packed.item() == pytest.approx(sum(counts) / num_trained, rel=1e-6)
    for key, one in adapter.parameters().items():
        assert one.grad is not None
        assert distance(grads[key], one.grad) < 1e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_one_document_runs_without_a_mask(
    bases: dict[str, TinyBase], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then do flash kernels take it; padding behind the document changes nothing. A window needs its mask."""
    calls: list[tuple[bool, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs.get("attn_mask") is None, bool(kwargs.get("is_causal"))))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    base = bases[name]
    model = base.open("resident")
    kinds = [one for one in base.family.layer_kinds("tiny") if not one.is_recurrent]
    with torch.no_grad():
        for batch in (rows([[LONG]], padding=7), {**rows([[LONG]]), "segments": None}):
            calls.clear()
            logits_of(base, model.module, batch)  # type: ignore[arg-type]
            assert calls == [(one.window is None, one.window is None) for one in kinds]
        calls.clear()
        logits_of(base, model.module, rows([[4, 4]]))
        assert calls == [(False, False) for _ in kinds]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_of_a_table_in_host_memory_are_the_tables(
    bases: dict[str, TinyBase], name: str, dtype: torch.dtype
) -> None:
    """Bit for bit, scaled where a family scales them (Gemma's by 8 here)."""
    table = bases[name].upstream().get_submodule("model.embed_tokens").to(dtype)
    ids = torch.tensor([[5, 639, 5], [0, 17, 2]])
    found = vectors_from_host(table, ids, torch.device("cpu"))
    assert torch.equal(found, table(ids))
    assert torch.equal(found, table.weight[ids] * (8 if name == "gemma4" else 1))


@pytest.mark.parametrize("name", NAMES)
def test_generating_step_by_step_gives_the_logits_of_the_whole_text(
    bases: dict[str, TinyBase], name: str
) -> None:
    """Through the cache, a prompt first and then token by token, past the window."""
    base, batch = bases[name], rows([[LONG], [LONG]])
    model, ids = base.open("stream"), batch["input_ids"]
    whole = upstream_model(name, base.decoded())(input_ids=ids, use_cache=False).logits
    cache = base.family.new_cache("tiny", model.module)
    done = 0
    for upto in (21, *range(22, LONG + 1)):
        model.begin("forward")
        found = base.family.next_logits("tiny", model.module, ids[:, done:upto], cache)
        assert found.dtype == torch.float32
        assert distance(found, whole[:, upto - 1]) < 1e-5
        done = upto


@pytest.mark.parametrize("name", NAMES)
def test_blocks_can_be_traced_and_share_a_graph_for_each_kind(
    bases: dict[str, TinyBase], name: str, tmp_path: Path
) -> None:
    """The graphs as they are traced, run by torch's interpreter; inductor has its own tests."""
    base, batch = bases[name], rows([[9, 18]])
    found = []
    compiler = BlockCompiler(tmp_path, compile_graph=lambda graph, _examples: graph)
    for options in ({}, {"make_runner": compiler}):
        model = base.open("resident", **options)
        adapter = attach(base, model)
        loss = loss_of(base, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append({key: one.grad for key, one in adapter.parameters().items()})
    kinds = len(set(base.family.layer_kinds("tiny")))
    assert compiler.num_graphs == 2 * kinds
    for key, one in found[0].items():
        assert one is not None
        assert distance(found[1][key], one) < 1e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_a_block_rounds_as_transformers_does(bases: dict[str, TinyBase], name: str) -> None:
    """The same operations give the same bits; linear attention, which is written anew, is as near to fp32 as upstream's."""
    base, batch = bases[name], rows([[LONG], [LONG]])
    tensors, ids = base.decoded(), batch["input_ids"]
    exact = upstream_model(name, tensors).model(input_ids=ids, use_cache=False)[0]
    models = (upstream_model(name, tensors), base.upstream())
    for model in models:
        for one in model.parameters():  # transformers too leaves rotary frequencies in fp32
            one.data = one.data.bfloat16()
    theirs = models[0].model(input_ids=ids, use_cache=False)[0]
    ours = base.family.hidden("tiny", models[1], ids, batch["position_ids"])
    assert ours.dtype == torch.bfloat16
    if name == "qwen3_5":
        assert distance(ours.float(), exact) < 1.1 * distance(theirs.float(), exact)
    else:
        assert torch.equal(ours, theirs)
