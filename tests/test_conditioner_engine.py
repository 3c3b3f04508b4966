"""Text encoders and codecs through the engine: packed, placed and wrapped, they encode as upstream's modules do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase
from tiny import write_tiny_component
from torch import Tensor, nn

from outsize.app.prepare import prepare_store
from outsize.devices.cpu import Cpu
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import assign
from outsize.formats.protocol import make_format
from outsize.weights.source import Source

TEXTS = ("clip_text", "mistral3_text", "qwen3_text", "t5_text")
CODECS = ("autoencoder_kl", "autoencoder_kl_flux2")
CAPTIONS = ["a photo of a cat", "", "far too many words " * 20]


@dataclass
class Conditioner:
    """A prepared tiny conditioner, and the folder of its tokenizer."""

    made: TinyBase
    tokenizer: Path

    @property
    def family(self) -> Any:
        return self.made.family

    def tokens(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.family.tokenize("tiny", self.tokenizer, CAPTIONS)
        return found


def _prepared(folder: Path, name: str) -> Conditioner:
    """Write published files and prepare them as the application does: text in nf4, codecs in fp32."""
    family = FAMILIES.load(name)
    is_text = name in TEXTS
    place = write_tiny_component(
        name, "tiny", folder, slot=name, tokenizer=f"{name}-tokenizer" if is_text else None, seed=3
    )
    table = family.table("tiny")
    chosen = make_format("nf4") if is_text else make_format("plain")
    plain = make_format("plain", {"dtype": "bf16" if is_text else "fp32"})
    packing = assign(table, chosen, plain)
    with Source(sorted(place.glob("*.safetensors"))) as source:
        store = prepare_store(
            table=table,
            layouts=family.layouts("tiny"),
            source=source,
            packing=packing,
            folder=folder / f"{name}-store",
            ram_budget_bytes=1 << 30,
        )
    return Conditioner(TinyBase(family, "tiny", packing, store), folder / f"{name}-tokenizer")


@pytest.fixture(scope="module")
def conditioners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conditioner]:
    folder = tmp_path_factory.mktemp("conditioners")
    return {name: _prepared(folder, name) for name in (*TEXTS, *CODECS)}


def _encoded(one: Conditioner, module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        found: dict[str, Tensor] = one.family.encode("tiny", module, one.tokens())
    return found


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name
        assert bool(torch.isfinite(value).all())
        assert float(value.float().std()) > 0


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_packed_text_encoder_equals_upstream_on_the_decoded_weights(
    conditioners: dict[str, Conditioner], name: str, placement: str
) -> None:
    """Twice over: the second pass finds the placement where the first one left it."""
    one = conditioners[name]
    theirs = _encoded(one, one.made.upstream())
    model = one.made.open(placement)
    for _ in range(2):
        model.begin("forward")
        _assert_same(_encoded(one, model.module), theirs)
    model.close()


@pytest.mark.parametrize("kept", ["no block", "the first block"])
def test_a_text_encoder_that_keeps_some_blocks_equals_one_that_keeps_none(
    conditioners: dict[str, Conditioner], kept: str
) -> None:
    one = conditioners["mistral3_text"]
    size = one.made.store.packet(0).streamed_bytes
    model = one.made.open("stream", resident_bytes=0 if kept == "no block" else size)
    model.begin("forward")
    _assert_same(_encoded(one, model.module), _encoded(one, one.made.upstream()))


def test_t5_computes_its_position_bias_once_and_hands_it_on_through_the_wrapped_blocks(
    conditioners: dict[str, Conditioner],
) -> None:
    """Only block 0 owns the table of relative positions; the others get its result as an argument and give it back."""
    one = conditioners["t5_text"]
    model = one.made.open("stream")
    seen: list[Tensor | None] = []
    given: list[Tensor] = []
    for path in one.family.block_paths("tiny"):
        block = model.module.get_submodule(path)
        block.register_forward_pre_hook(lambda _block, args: seen.append(args[2]))
        block.register_forward_hook(lambda _block, _args, out: given.append(out[1]))
    model.begin("forward")
    _encoded(one, model.module)
    bias = given[0]
    assert seen[0] is None
    assert bias.shape[1] == 2  # one bias for each head
    assert float(bias.std()) > 0
    for received in (*seen[1:], *given[1:]):
        assert received is not None
        assert torch.equal(received, bias)


@pytest.mark.parametrize("name", ["mistral3_text", "qwen3_text", "clip_text", "t5_text"])
def test_transformers_captures_hidden_states_of_wrapped_blocks(
    conditioners: dict[str, Conditioner], name: str
) -> None:
    """Transformers hangs its capture on the modules' calls; a wrapped forward must not hide them."""
    one = conditioners[name]
    model = one.made.open("stream")
    tokens = one.tokens()
    with torch.no_grad():
        model.begin("forward")
        ours = model.module(**tokens, output_hidden_states=True).hidden_states
        theirs = one.made.upstream()(**tokens, output_hidden_states=True).hidden_states
    num_blocks = len(one.family.block_paths("tiny"))
    assert len(ours) == len(theirs) == num_blocks + 1
    for mine, upstream in zip(ours, theirs, strict=True):
        assert torch.equal(mine, upstream)


@pytest.mark.parametrize("name", TEXTS)
def test_in_bf16_a_packed_text_encoder_equals_the_unpacked_one(
    conditioners: dict[str, Conditioner], name: str
) -> None:
    """T5 asks its output projection for the weight's type and casts to it: the absent weight must say bf16."""
    one = conditioners[name]
    model = one.made.open("stream", device=Cpu(compute_dtype=torch.bfloat16))
    plain = one.made.upstream().to(torch.bfloat16)
    one.family.materialise_buffers(plain, torch.device("cpu"))  # rotary tables stay fp32
    model.begin("forward")
    ours = _encoded(one, model.module)
    _assert_same(ours, _encoded(one, plain))
    assert {value.dtype for value in ours.values()} == {torch.bfloat16}


def _pixels(one: Conditioner) -> Tensor:
    side = one.family.pixel_multiple("tiny")
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, 4 * side, 3 * side, generator=generator) * 2 - 1


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_from_its_store_equals_upstream_on_the_same_weights(
    conditioners: dict[str, Conditioner], name: str, placement: str
) -> None:
    """A codec has no blocks: every placement must hold it whole."""
    one = conditioners[name]
    model, upstream, pixels = one.made.open(placement), one.made.upstream(), _pixels(one)
    with torch.no_grad():
        model.begin("forward")
        latents = one.family.encode("tiny", model.module, pixels)
        theirs = one.family.encode("tiny", upstream, pixels)
        _assert_same({"latents": latents}, {"latents": theirs})
        _assert_same(
            {"pixels": one.family.decode("tiny", model.module, latents)},
            {"pixels": one.family.decode("tiny", upstream, theirs)},
        )
    assert latents.shape[1:] == one.family.latent_shape("tiny", *pixels.shape[2:])


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_loses_no_bit_of_its_file(conditioners: dict[str, Conditioner], name: str) -> None:
    from safetensors.torch import load_file

    one = conditioners[name]
    published = load_file(one.tokenizer.parent / name / "diffusion_pytorch_model.safetensors")
    decoded = one.made.decoded()
    assert decoded.keys() <= published.keys()
    assert all(torch.equal(value, published[key].float()) for key, value in decoded.items())
