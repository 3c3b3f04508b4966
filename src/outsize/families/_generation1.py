"""Shapes and file names of the first generation: modulation in every block, biases everywhere."""

from __future__ import annotations

from typing import Protocol

from outsize.base.layout import Layout, Rule
from outsize.base.table import ShapeTable
from outsize.families import _bfl
from outsize.families._specs import Specs, linear, norm


class Dimensions(_bfl.Dimensions, Protocol):
    """What shapes of this generation depend on."""

    @property
    def pooled_width(self) -> int:
        """Width of a caption's one vector."""


_LEAVES = ("weight", "bias")


def _linear1(leaf: str) -> tuple[Rule, ...]:
    # query, key, value and an mlp of 4 widths in one matrix: 7 slabs
    at, theirs = _bfl.SINGLE[0], f"{_bfl.SINGLE[1]}.linear1.{leaf}"
    return (
        Rule(f"{at}.attn.to_q.{leaf}", theirs, part=(0, 7)),
        Rule(f"{at}.attn.to_k.{leaf}", theirs, part=(1, 7)),
        Rule(f"{at}.attn.to_v.{leaf}", theirs, part=(2, 7)),
        Rule(f"{at}.proj_mlp.{leaf}", theirs, part=(3, 7), span=4),
    )


SINGLE_FILE = Layout(
    "bfl",
    prefixes=_bfl.PREFIXES,
    # for this generation diffusers reads an adapter under these names only in the older spelling
    lora_names=("lora_down", "lora_up"),
    lora_module="networks.lora_flux",
    rules=(
        *_bfl.modules(
            {
                "x_embedder": "img_in",
                "context_embedder": "txt_in",
                "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
                "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
                "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
                "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
                "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
                "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
                "proj_out": "final_layer.linear",
            },
            _LEAVES,
        ),
        *_bfl.last_modulation(_LEAVES),
        *_bfl.double_attention(_LEAVES),
        *_bfl.modules(
            {
                "norm1.linear": "img_mod.lin",
                "norm1_context.linear": "txt_mod.lin",
                "ff.net.0.proj": "img_mlp.0",
                "ff.net.2": "img_mlp.2",
                "ff_context.net.0.proj": "txt_mlp.0",
                "ff_context.net.2": "txt_mlp.2",
            },
            _LEAVES,
            _bfl.DOUBLE,
        ),
        *_linear1("weight"),
        *_linear1("bias"),
        *_bfl.modules(
            {"norm.linear": "modulation.lin", "proj_out": "linear2"}, _LEAVES, _bfl.SINGLE
        ),
    ),
)


def shape_table(row: Dimensions) -> ShapeTable:
    """Every tensor; double blocks are numbered first, then single ones."""
    double, single, width = _double_block(row), _single_block(row), row.width
    return ShapeTable(
        (
            *_embedders(row),
            *_bfl.block_specs(row, double, single),
            *linear("norm_out.linear", 2 * width, width, "modulation", has_bias=True),
            *linear("proj_out", row.in_channels, width, "head", has_bias=True),
        )
    )


def _embedders(row: Dimensions) -> Specs:
    inputs = {"timestep_embedder": 256, "guidance_embedder": 256, "text_embedder": row.pooled_width}
    if not row.has_guidance:
        del inputs["guidance_embedder"]
    return (
        *(
            spec
            for name, num_in in inputs.items()
            for part, size in (("linear_1", num_in), ("linear_2", row.width))
            for spec in linear(
                f"time_text_embed.{name}.{part}", row.width, size, "embed", has_bias=True
            )
        ),
        *linear("context_embedder", row.width, row.joint_width, "embed", has_bias=True),
        *linear("x_embedder", row.width, row.in_channels, "embed", has_bias=True),
    )


def _attention(width: int, *names: str) -> Specs:
    return tuple(
        spec
        for name in names
        for spec in linear(f"attn.{name}", width, width, "attention", has_bias=True)
    )


def _double_block(row: Dimensions) -> Specs:
    width, inner = row.width, 4 * row.width
    return (
        *linear("norm1.linear", 6 * width, width, "modulation", has_bias=True),
        *linear("norm1_context.linear", 6 * width, width, "modulation", has_bias=True),
        *norm("attn.norm_q", row.head_dim),
        *norm("attn.norm_k", row.head_dim),
        *_attention(width, "to_q", "to_k", "to_v", "to_out.0"),
        *norm("attn.norm_added_q", row.head_dim),
        *norm("attn.norm_added_k", row.head_dim),
        *_attention(width, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *linear("ff.net.0.proj", inner, width, "mlp", has_bias=True),
        *linear("ff.net.2", width, inner, "mlp", has_bias=True),
        *linear("ff_context.net.0.proj", inner, width, "mlp", has_bias=True),
        *linear("ff_context.net.2", width, inner, "mlp", has_bias=True),
    )


def _single_block(row: Dimensions) -> Specs:
    width, inner = row.width, 4 * row.width
    return (
        *linear("norm.linear", 3 * width, width, "modulation", has_bias=True),
        *linear("proj_mlp", inner, width, "mlp", has_bias=True),
        # fused: it takes the outputs of attention and mlp together
        *linear("proj_out", width, width + inner, "attention", has_bias=True),
        *norm("attn.norm_q", row.head_dim),
        *norm("attn.norm_k", row.head_dim),
        *_attention(width, "to_q", "to_k", "to_v"),
    )
