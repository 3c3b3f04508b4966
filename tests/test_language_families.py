"""The language families against transformers: names in files of every class, sizes, what each layer costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_support import NAMES, upstream_class
from safetensors.torch import save_file
from tiny import random_tensors

from outsize.base.layout import Layout
from outsize.families._packed import attention_mask, several_documents
from outsize.families.protocol import FAMILIES, LanguageFamily, LayerKind
from outsize.weights.mapping import MappedSource
from outsize.weights.source import Source

TOWERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def family(name: str) -> LanguageFamily:
    plugin: LanguageFamily = FAMILIES.load(name)
    return plugin


def with_tower(name: str) -> Any:
    """The class with a tower for pictures, under which the family's real sizes are published; tiny, by transformers."""
    import transformers

    plugin: Any = FAMILIES.load(name)
    text = plugin.config("tiny")
    if name == "gemma4":
        return transformers.Gemma4ForConditionalGeneration(
            transformers.Gemma4Config(text_config=text, vision_config={**TOWERS, **HEADS})
        )
    if name == "qwen3_5":
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        return transformers.Qwen3_5ForConditionalGeneration(
            transformers.Qwen3_5Config(
                text_config=text, vision_config={**vision, "out_hidden_size": 64}
            )
        )
    vision = {"model_type": "pixtral", **TOWERS, "num_attention_heads": 2, "head_dim": 8}
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={"model_type": "mistral", **text},
            vision_config=vision,
            tie_word_embeddings=False,
        )
    )


def located(name: str, folder: Path) -> MappedSource:
    """Where the family finds its tensors."""
    with Source(sorted(folder.glob("*.safetensors"))) as source:
        return source.locate(family(name).layouts("tiny"), family(name).table("tiny"))


def is_left_out(name: str, tensor: str) -> bool:
    return bool(set(tensor.split(".")) & set(family(name).left_out))


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_a_language_family(name: str) -> None:
    plugin = family(name)
    assert plugin.objective == "next_token"
    assert (plugin.folder, plugin.tokenizer_folder) == ("", "")
    for variant in plugin.variants:
        table = plugin.table(variant)
        assert plugin.components(variant) == ()
        assert len(plugin.layer_kinds(variant)) == table.num_blocks
        assert table["model.embed_tokens.weight"].shape[0] == plugin.vocabulary(variant)
    assert len(set(plugin.layer_kinds("tiny"))) == (2 if name in {"gemma4", "qwen3_5"} else 1)


def test_sizes_are_those_that_were_published() -> None:
    """All parameters, and those in linears, in billions; the latter as research counted them from configurations."""
    sizes = {
        (name, variant): (
            round(family(name).table(variant).num_parameters / 1e9, 2),
            round(sum(one.num_elements for one in family(name).table(variant).linears()) / 1e9, 2),
        )
        for name, variant in (
            ("gemma4", "31b"),
            ("qwen3_5", "27b"),
            ("mistral3", "small-24b"),
            ("llama", "smollm2-135m"),
        )
    }
    # Qwen's thin projections, 48 x 2 x 48 x 5120, are not among its linears
    assert list(sizes.values()) == [(30.70, 29.29), (26.90, 24.33), (23.57, 22.23), (0.13, 0.11)]


def test_what_differs_between_layers_is_in_the_tables() -> None:
    gemma = family("gemma4").table("31b")
    names = set(gemma.by_name)
    full = [i for i in range(60) if f"model.layers.{i}.self_attn.v_proj.weight" not in names]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert gemma["model.layers.5.self_attn.k_proj.weight"].shape == (4 * 512, 5376)
    assert gemma["model.layers.4.self_attn.q_proj.weight"].shape == (32 * 256, 5376)
    qwen = family("qwen3_5").table("27b")
    mixers = [i for i in range(64) if f"model.layers.{i}.linear_attn.A_log" in qwen.by_name]
    assert mixers == [i for i in range(64) if (i + 1) % 4]
    assert qwen["model.layers.0.linear_attn.in_proj_qkv.weight"].shape == (10240, 5120)
    adapted = {spec.name.split(".")[-2] for spec in qwen.linears(["linear_attention"])}
    assert adapted == {"in_proj_qkv", "in_proj_z", "out_proj"}


def test_fewer_layers_end_as_all_do() -> None:
    """Gemma's last layer sees all tokens at any depth, as transformers forces it."""
    kinds = family("gemma4").layer_kinds("31b@4")
    assert [one.window for one in kinds] == [1024, 1024, 1024, None]
    assert [one.is_recurrent for one in family("qwen3_5").layer_kinds("27b@4")] == [True] * 3 + [
        False
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_class_for_text_saves_is_found(name: str, tmp_path: Path) -> None:
    made = upstream_class(name)
    plugin: Any = family(name)
    made(made.config_class(**plugin.config("tiny"))).save_pretrained(tmp_path)
    found = located(name, tmp_path)
    assert found.layout == "causal"
    assert not found.extra


@pytest.mark.parametrize("name", ["gemma4", "mistral3", "qwen3_5"])
def test_what_the_class_with_towers_saves_is_found_and_the_rest_is_known(
    name: str, tmp_path: Path
) -> None:
    """As transformers writes it, and under the names that are in its memory; nothing is left over unexplained."""
    model = with_tower(name)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "named").mkdir()
    state = {key: one.contiguous().clone() for key, one in model.state_dict().items()}
    save_file(state, tmp_path / "named" / "model.safetensors")
    layouts = []
    for folder in ("saved", "named"):
        found = located(name, tmp_path / folder)
        assert found.extra, "the tower is there"
        unknown = [one for one in found.extra if not is_left_out(name, one)]
        tied = ["lm_head.weight"] if name == "gemma4" else []
        assert unknown in ([], tied)
        layouts.append(found.layout)
    assert layouts[1] == "conditional"
    assert layouts[0] in ("conditional", "nested")


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_a_decoder_is_found(name: str, tmp_path: Path) -> None:
    """Spelt out here, apart from the layouts: decoder, then head."""
    plugin = family(name)
    tensors = random_tensors(plugin.table("tiny"), seed=2)
    places = {
        "causal": ("model.", ""),
        "conditional": ("model.language_model.", ""),
        "nested": ("language_model.model.", "language_model."),
        "decoder": ("", ""),
    }
    for place, (decoder, head) in places.items():
        named = {
            head + key if key.startswith("lm_head") else decoder + key.removeprefix("model."): one
            for key, one in tensors.items()
        }
        folder = tmp_path / place
        folder.mkdir()
        save_file({**named, "mtp.fc.weight": torch.zeros(2)}, folder / "model.safetensors")
        found = located(name, folder)
        assert (found.layout, found.extra) == (place, ("mtp.fc.weight",))
        for key in tensors:
            window = found.windows[key][0].tensor
            assert torch.equal(named[window], tensors[key])


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_head_exists_once(name: str) -> None:
    plugin = family(name)
    is_tied = name in {"gemma4", "llama"}
    for variant in plugin.variants:
        assert ("lm_head.weight" in plugin.table(variant).by_name) != is_tied
    model = plugin.build("tiny")
    head, _ = plugin.head("tiny", model)
    assert (head is model.get_parameter("model.embed_tokens.weight")) == is_tied
    assert head.shape == (plugin.vocabulary("tiny"), 64)
    config: Any = model.config
    assert config.tie_word_embeddings == is_tied


def test_the_cap_of_the_logits_is_gemmas_alone() -> None:
    caps = {name: family(name).head("tiny", family(name).build("tiny")).softcap for name in NAMES}
    assert caps == {"gemma4": 30.0, "llama": None, "mistral3": None, "qwen3_5": None}


def test_every_layout_names_every_linear_once() -> None:
    """Adapters are written by the same rules."""
    for name in NAMES:
        for layout in family(name).layouts("tiny"):
            assert isinstance(layout, Layout)
            theirs = [layout.rule_of(one.name)[1] for one in family(name).table("tiny")]
            assert len(set(theirs)) == len(theirs)
            for one in family(name).table("tiny"):
                assert layout.ours_of(layout.rule_of(one.name)[1]) == (one.name,)


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
@pytest.mark.parametrize("num_tokens", [1, 5, 12])
def test_pairs_are_those_of_the_mask(window: int | None, num_tokens: int) -> None:
    mask = attention_mask(torch.zeros(1, num_tokens), num_tokens, window, torch.device("cpu"))
    assert mask is not None
    kind = LayerKind("full_attention", 8, 4, window=window)
    assert kind.num_pairs(num_tokens) == int(mask.sum())
    assert kind.flops(num_tokens) == 4 * 8 * int(mask.sum())
    assert kind.cache_elements(num_tokens) == 4 * int(mask[0, 0, -1].sum())


def test_a_mask_is_made_only_where_the_causal_flag_says_too_little() -> None:
    device = torch.device("cpu")
    one, padded = torch.tensor([[0, 0, 0]]), torch.tensor([[0, 0, -1]])
    for segments in (None, one, padded, torch.tensor([[2, 2, 2]])):
        assert several_documents(segments) is None
    for rows in ([[0, 0, 1]], [[0, -1, 1]], [[-1, 0, 0]], [[0, 0, 0], [0, 1, 1]]):
        assert several_documents(torch.tensor(rows)) is not None
    assert attention_mask(None, 3, 3, device) is None
    assert attention_mask(None, 3, None, device) is None
    windowed = attention_mask(None, 3, 2, device)
    assert windowed is not None
    assert windowed[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
    packed = attention_mask(torch.tensor([[0, 1, -1]]), 3, None, device)
    assert packed is not None
    assert packed[0, 0].tolist() == torch.eye(3).bool().tolist()


def test_numbers_that_no_shape_shows_are_upstreams() -> None:
    """Rotary angles and epsilons would be wrong in silence; these are transformers' own defaults, which Gemma keeps."""
    import transformers

    plugin: Any = family("gemma4")
    ours, theirs = plugin.config("31b"), transformers.Gemma4TextConfig()
    for key in ("rope_parameters", "rms_norm_eps", "vocab_size", "tie_word_embeddings"):
        assert ours[key] == getattr(theirs, key), key
    for variant in ("27b", "tiny"):
        qwen: Any = family("qwen3_5")
        config = qwen.config(variant)
        rope = config["rope_parameters"]
        # an angle turns two numbers, and a quarter of a head is turned
        assert 2 * sum(rope["mrope_section"]) == config["head_dim"] * rope["partial_rotary_factor"]
        assert config["rms_norm_eps"] == transformers.Qwen3_5TextConfig().rms_norm_eps
