"""Text encoders and image codecs against the pipelines of diffusers, on tiny models with whole published files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_families import assert_same, filled, found_in, read_by_layout
from tiny import bfl_names, random_tensors, write_tiny_component
from torch import Tensor

from outsize.base.errors import SourceError
from outsize.families.protocol import FAMILIES

CAPTIONS = [
    "a photo of a cat",
    "",
    "two lines,\nan umlaut \u00fc and [IMG] " + "far too many words " * 20,
]
TEXTS = ("clip_text", "mistral3_text", "qwen3_text", "t5_text")
CODECS = ("autoencoder_kl", "autoencoder_kl_flux2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tiny text encoder in fp32: weights in <family>, tokenizer in <family>-tokenizer."""
    path = tmp_path_factory.mktemp("encoders")
    for family in TEXTS:
        write_tiny_component(
            family,
            "tiny",
            path,
            slot=family,
            tokenizer=f"{family}-tokenizer",
            dtype=torch.float32,
        )
    return path


def on_meta(family: str, variant: str) -> dict[str, Tensor]:
    """A full-size file under our names, without values."""
    table = FAMILIES.load(family).table(variant)
    return {spec.name: torch.empty(spec.shape, device="meta") for spec in table}


def published(folder: Path, family: str) -> dict[str, Tensor]:
    """The file's tensors, unread ones included."""
    return load_file(folder / family / "model.safetensors")


def ours(folder: Path, family: str) -> Any:
    """Our cut model, filled from the published file by our layout."""
    plugin: Any = FAMILIES.load(family)
    specs, file = list(plugin.table("tiny")), published(folder, family)
    layout, prefix = found_in(family, "tiny", file)
    model = plugin.build("tiny")
    model.load_state_dict(read_by_layout(layout, specs, file, prefix), assign=True)
    plugin.materialise_buffers(model, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def encoded(folder: Path, family: str, captions: list[str]) -> dict[str, Tensor]:
    """What our plug-in makes of captions."""
    plugin: Any = FAMILIES.load(family)
    tokens = plugin.tokenize("tiny", folder / f"{family}-tokenizer", captions)
    found: dict[str, Tensor] = plugin.encode("tiny", ours(folder, family), tokens)
    return found


def whole_upstream(folder: Path, family: str) -> Any:
    """Upstream's whole class, with every published tensor."""
    import transformers

    plugin: Any = FAMILIES.load(family)
    config, file = plugin.config("tiny"), published(folder, family)
    if family == "mistral3_text":
        model = transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(
                tie_word_embeddings=False,
                text_config={"model_type": "mistral", "sliding_window": None, **config},
                vision_config={
                    "model_type": "pixtral",
                    "hidden_size": 32,
                    "intermediate_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                },
            )
        )
        file = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): tensor
            for name, tensor in file.items()
            if name.startswith("language_model.")
        }
        missing, unexpected = model.load_state_dict(file, strict=False)
        assert all("vision" in name or "multi_modal" in name for name in missing)
    else:
        classes = {
            "clip_text": (transformers.CLIPTextModel, transformers.CLIPTextConfig),
            "qwen3_text": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
            "t5_text": (transformers.T5EncoderModel, transformers.T5Config),
        }
        model_class, config_class = classes[family]
        model = model_class(config_class(**config))
        if family == "clip_text":
            file = {name.removeprefix("text_model."): one for name, one in file.items()}
        missing, unexpected = model.load_state_dict(file, strict=False)
        assert set(missing) <= {"encoder.embed_tokens.weight"}  # T5 ties it to `shared`
    assert not unexpected
    return model.eval()


def upstream_tokenizer(folder: Path, family: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / f"{family}-tokenizer")


def test_mistral_states_equal_those_of_flux2pipeline(folder: Path) -> None:
    """The whole model has a layer, a norm and a head above the last state that is read."""
    from diffusers import Flux2Pipeline

    with torch.no_grad():
        theirs = Flux2Pipeline._get_mistral_3_small_prompt_embeds(
            whole_upstream(folder, "mistral3_text"),
            upstream_tokenizer(folder, "mistral3_text"),
            CAPTIONS,
            max_sequence_length=64,
            hidden_states_layers=[1, 2, 3],
        )
    assert torch.equal(encoded(folder, "mistral3_text", CAPTIONS)["text"], theirs)


def test_mistral_prompts_are_worded_as_flux2pipeline_words_them() -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input

    from outsize.families.mistral3_text import _conversation

    assert [_conversation(text) for text in CAPTIONS] == format_input(CAPTIONS)


def test_mistral_tokens_equal_those_that_the_processor_makes(folder: Path) -> None:
    """The pipeline goes through PixtralProcessor, which needs torchvision: it renders, then tokenizes plainly.

    Its rule: a text that begins with the beginning mark gets no second one.
    """
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input

    tokenizer = upstream_tokenizer(folder, "mistral3_text")
    rendered = tokenizer.apply_chat_template(
        format_input(CAPTIONS), add_generation_prompt=False, tokenize=False
    )
    assert all(text.startswith(tokenizer.bos_token) for text in rendered)
    theirs = tokenizer(
        rendered,
        add_special_tokens=False,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=64,
    )
    plugin: Any = FAMILIES.load("mistral3_text")
    found = plugin.tokenize("tiny", folder / "mistral3_text-tokenizer", CAPTIONS)
    assert_same(found, {key: theirs[key] for key in found})


def test_qwen_states_equal_those_of_the_klein_pipeline(folder: Path) -> None:
    from diffusers import Flux2KleinPipeline

    with torch.no_grad():
        theirs = Flux2KleinPipeline._get_qwen3_prompt_embeds(
            whole_upstream(folder, "qwen3_text"),
            upstream_tokenizer(folder, "qwen3_text"),
            CAPTIONS,
            max_sequence_length=64,
            hidden_states_layers=[1, 2, 3],
        )
    assert torch.equal(encoded(folder, "qwen3_text", CAPTIONS)["text"], theirs)


def test_a_decoder_cut_with_its_norm_would_give_another_state(folder: Path) -> None:
    """The trap that the identity above the last layer is there for."""
    model = ours(folder, "qwen3_text")
    plugin: Any = FAMILIES.load("qwen3_text")
    tokens = plugin.tokenize("tiny", folder / "qwen3_text-tokenizer", CAPTIONS)
    last = plugin.encode("tiny", model, tokens)["text"].chunk(3, dim=-1)[2]
    whole = whole_upstream(folder, "qwen3_text").model
    assert torch.equal(model(**tokens).last_hidden_state, last)
    assert not torch.equal(whole.norm(last), last)


def flux1_pipeline(folder: Path) -> Any:
    """As much of a FluxPipeline as its prompt encoders look at."""
    return SimpleNamespace(
        tokenizer=upstream_tokenizer(folder, "clip_text"),
        tokenizer_2=upstream_tokenizer(folder, "t5_text"),
        text_encoder=whole_upstream(folder, "clip_text"),
        text_encoder_2=whole_upstream(folder, "t5_text"),
        tokenizer_max_length=64,
        _execution_device=torch.device("cpu"),
    )


def test_clip_and_t5_embeddings_equal_those_of_fluxpipeline(folder: Path) -> None:
    from diffusers import FluxPipeline

    pipeline = flux1_pipeline(folder)
    assert pipeline.tokenizer.model_max_length == 64
    with torch.no_grad():
        pooled = FluxPipeline._get_clip_prompt_embeds(pipeline, CAPTIONS)
        text = FluxPipeline._get_t5_prompt_embeds(pipeline, CAPTIONS, max_sequence_length=64)
    assert torch.equal(encoded(folder, "clip_text", CAPTIONS)["pooled"], pooled)
    assert torch.equal(encoded(folder, "t5_text", CAPTIONS)["text"], text)


@pytest.mark.parametrize("family", TEXTS)
def test_different_captions_get_different_embeddings(family: str, folder: Path) -> None:
    """A caption that falls out of the tiny window would make every test of conditioning empty."""
    (value,) = encoded(folder, family, ["a red cat", "a blue dog"]).values()
    assert torch.isfinite(value).all()
    assert not torch.equal(value[0], value[1])


@pytest.mark.parametrize("family", TEXTS)
def test_a_caption_is_encoded_alike_alone_and_in_a_batch(family: str, folder: Path) -> None:
    """Embeddings are cached by caption. Kernels of other shapes round otherwise: fp32, a few ulps of order 1."""
    (batch,) = encoded(folder, family, CAPTIONS).values()
    (alone,) = encoded(folder, family, CAPTIONS[:1]).values()
    torch.testing.assert_close(alone[0], batch[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_mistral_is_found_under_every_published_path(prefix: str) -> None:
    file = {prefix + name: one for name, one in on_meta("mistral3_text", "small-24b").items()}
    for name in ("vision_tower.patch_conv.weight", "language_model.lm_head.weight"):
        file[name] = torch.empty(1, device="meta")
    assert found_in("mistral3_text", "small-24b", file)[1] == prefix


def test_t5_is_found_with_its_token_table_under_either_name() -> None:
    file = on_meta("t5_text", "xxl")
    assert found_in("t5_text", "xxl", file)[0].name == "encoder-only"
    file["shared.weight"] = file.pop("encoder.embed_tokens.weight")
    assert found_in("t5_text", "xxl", file)[0].name == "transformers"


def test_a_missing_tokenizer_or_template_is_named(folder: Path, tmp_path: Path) -> None:
    plugin: Any = FAMILIES.load("qwen3_text")
    with pytest.raises(SourceError, match="no tokenizer folder"):
        plugin.tokenize("tiny", tmp_path / "nowhere", CAPTIONS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no tokenizer"):
        plugin.tokenize("tiny", tmp_path / "empty", CAPTIONS)
    with pytest.raises(SourceError, match="has no chat template"):
        plugin.tokenize("tiny", folder / "t5_text-tokenizer", CAPTIONS)


def pictures(family: str, variant: str = "tiny") -> Tensor:
    """Two pictures, higher than wide, in -1..1."""
    side = FAMILIES.load(family).pixel_multiple(variant)
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, 4 * side, 3 * side, generator=generator) * 2 - 1


def upstream_latents(family: str, model: Any, pixels: Tensor) -> Tensor:
    """What the pipelines train on, by their own helpers."""
    from diffusers import Flux2Pipeline

    mean = model.encode(pixels).latent_dist.mode()
    if family == "autoencoder_kl":
        return (mean - model.config.shift_factor) * model.config.scaling_factor
    return Flux2Pipeline._encode_vae_image(
        SimpleNamespace(vae=model, _patchify_latents=Flux2Pipeline._patchify_latents), pixels, None
    )


def upstream_pixels(family: str, model: Any, latents: Tensor) -> Tensor:
    """What the pipelines decode, by their own helpers."""
    from diffusers import Flux2Pipeline

    if family == "autoencoder_kl":
        latents = latents / model.config.scaling_factor + model.config.shift_factor
    else:
        deviation = torch.sqrt(model.bn.running_var.view(1, -1, 1, 1) + model.config.batch_norm_eps)
        latents = latents * deviation + model.bn.running_mean.view(1, -1, 1, 1)
        latents = Flux2Pipeline._unpatchify_latents(latents)
    decoded: Tensor = model.decode(latents, return_dict=False)[0]
    return decoded


@pytest.mark.parametrize("family", CODECS)
def test_latents_and_pixels_equal_those_of_the_pipeline(family: str) -> None:
    plugin: Any = FAMILIES.load(family)
    model, pixels = filled(family, "tiny"), pictures(family)
    with torch.no_grad():
        latents = plugin.encode("tiny", model, pixels)
        assert torch.equal(latents, upstream_latents(family, model, pixels))
        decoded = plugin.decode("tiny", model, latents)
        assert torch.equal(decoded, upstream_pixels(family, model, latents))
    assert latents.shape[1:] == plugin.latent_shape("tiny", *pixels.shape[2:])
    assert decoded.shape == pixels.shape


@pytest.mark.parametrize("family", CODECS)
def test_a_codec_in_bf16_still_normalises_in_fp32(family: str) -> None:
    """Two latents that differ by less than bf16 can tell after the shift stay apart."""
    plugin: Any = FAMILIES.load(family)
    model = filled(family, "tiny")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        latents = plugin.encode("tiny", model, pictures(family))
        decoded = plugin.decode("tiny", model, latents)
        mean = model.encode(pictures(family).bfloat16()).latent_dist.mode().float()
    assert latents.dtype == decoded.dtype == torch.float32
    assert torch.equal(latents, _normalised(family, model, mean))
    assert not torch.equal(latents, latents.bfloat16().float())


def _normalised(family: str, model: Any, mean: Tensor) -> Tensor:
    from diffusers import Flux2Pipeline

    if family == "autoencoder_kl":
        return (mean - 0.1159) * 0.3611
    deviation = torch.sqrt(model.bn.running_var.view(1, -1, 1, 1) + 1e-4)
    return (
        Flux2Pipeline._patchify_latents(mean) - model.bn.running_mean.view(1, -1, 1, 1)
    ) / deviation


@pytest.mark.parametrize(
    ("family", "variant"),
    [*((family, "tiny") for family in CODECS), ("autoencoder_kl_flux2", "teaching")],
)
def test_bfls_ae_file_is_read_back_tensor_for_tensor(family: str, variant: str) -> None:
    """Reversed levels of the decoder, and linears written as 1x1 convolutions; against tests/tiny.py."""
    plugin: Any = FAMILIES.load(family)
    specs = list(plugin.table(variant))
    tensors = random_tensors(specs, seed=2)
    theirs = bfl_names(family, tensors)
    layout, prefix = found_in(family, variant, theirs)
    assert (layout.name, prefix) == ("bfl", "")
    assert_same(read_by_layout(layout, specs, theirs), tensors)


@pytest.mark.parametrize("variant", ["flux1", "flux2"])
def test_a_real_ae_files_levels_are_numbered_from_the_picture_up(variant: str) -> None:
    family = "autoencoder_kl" if variant == "flux1" else "autoencoder_kl_flux2"
    layout = next(one for one in FAMILIES.load(family).layouts(variant) if one.name == "bfl")
    first = "decoder.up_blocks.0.resnets.2.conv1.weight"
    last = "decoder.up_blocks.3.resnets.0.conv_shortcut.bias"
    assert layout.rule_of(first)[1] == "decoder.up.3.block.2.conv1.weight"
    assert layout.rule_of(last)[1] == "decoder.up.0.block.0.nin_shortcut.bias"
    down = "encoder.down_blocks.2.downsamplers.0.conv.weight"
    assert layout.rule_of(down)[1] == "encoder.down.2.downsample.conv.weight"


def test_diffusers_reads_an_ae_file_as_we_do() -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    plugin: Any = FAMILIES.load("autoencoder_kl")
    tensors: Mapping[str, Tensor] = random_tensors(plugin.table("tiny"), seed=6)
    theirs = bfl_names("autoencoder_kl", tensors)
    read = convert_ldm_vae_checkpoint(theirs, plugin.config("tiny"))
    assert_same({name: one for name, one in read.items() if one is not None}, tensors)
