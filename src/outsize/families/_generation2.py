"""Shapes and file names of the second generation: shared modulation, fused qkv+mlp matrices, no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families import _bfl
from outsize.families._specs import Specs, linear, norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WEIGHT = ("weight",)

SINGLE_FILE = Layout(
    "bfl",
    prefixes=_bfl.PREFIXES,
    lora_module="networks.lora_flux_2",
    rules=(
        *_bfl.modules(
            {
                "x_embedder": "img_in",
                "context_embedder": "txt_in",
                "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
                "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
                "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
                "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
                "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
                "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
                "single_stream_modulation.linear": "single_stream_modulation.lin",
                "proj_out": "final_layer.linear",
            },
            _WEIGHT,
        ),
        *_bfl.last_modulation(_WEIGHT),
        *_bfl.double_attention(_WEIGHT),
        *_bfl.modules(
            {
                "ff.linear_in": "img_mlp.0",
                "ff.linear_out": "img_mlp.2",
                "ff_context.linear_in": "txt_mlp.0",
                "ff_context.linear_out": "txt_mlp.2",
            },
            _WEIGHT,
            _bfl.DOUBLE,
        ),
        *_bfl.modules(
            {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}, _WEIGHT, _bfl.SINGLE
        ),
    ),
)


def shape_table(row: _bfl.Dimensions) -> ShapeTable:
    """Every tensor; double blocks are numbered first, then single ones."""
    double, single = _double_block(row), _single_block(row)
    return ShapeTable(
        (
            *_embedders(row),
            *_bfl.block_specs(row, double, single),
            *linear("norm_out.linear", 2 * row.width, row.width, "modulation"),
            *linear("proj_out", row.in_channels, row.width, "head"),
        )
    )


def _double_block(row: _bfl.Dimensions) -> Specs:
    width, inner = row.width, 3 * row.width

    def projections(names: tuple[str, ...]) -> Specs:
        return tuple(spec for name in names for spec in linear(name, width, width, "attention"))

    def head_norms(*names: str) -> Specs:
        return tuple(spec for name in names for spec in norm(name, row.head_dim))

    return (
        *projections(("attn.to_q", "attn.to_k", "attn.to_v")),
        *head_norms("attn.norm_q", "attn.norm_k"),
        *projections(("attn.to_out.0",)),
        *head_norms("attn.norm_added_q", "attn.norm_added_k"),
        *projections(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")),
        *linear("ff.linear_in", 2 * inner, width, "mlp"),
        *linear("ff.linear_out", width, inner, "mlp"),
        *linear("ff_context.linear_in", 2 * inner, width, "mlp"),
        *linear("ff_context.linear_out", width, inner, "mlp"),
    )


def _single_block(row: _bfl.Dimensions) -> Specs:
    width, inner = row.width, 3 * row.width
    return (
        *linear("attn.to_qkv_mlp_proj", 3 * width + 2 * inner, width, "attention"),
        *norm("attn.norm_q", row.head_dim),
        *norm("attn.norm_k", row.head_dim),
        *linear("attn.to_out", width, width + inner, "attention"),
    )


def _embedders(row: _bfl.Dimensions) -> Specs:
    width = row.width
    embedders = ("timestep_embedder", "guidance_embedder")[: 2 if row.has_guidance else 1]
    return (
        *(
            spec
            for name in embedders
            for spec in (
                *linear(f"time_guidance_embed.{name}.linear_1", width, 256, "embed"),
                *linear(f"time_guidance_embed.{name}.linear_2", width, width, "embed"),
            )
        ),
        *linear("double_stream_modulation_img.linear", 6 * width, width, "modulation"),
        *linear("double_stream_modulation_txt.linear", 6 * width, width, "modulation"),
        *linear("single_stream_modulation.linear", 3 * width, width, "modulation"),
        *linear("x_embedder", width, row.in_channels, "embed"),
        *linear("context_embedder", width, row.joint_width, "embed"),
    )


def positions(t: int, h: int, w: int, length: int, *, device: torch.device) -> Tensor:
    """Position ids (t*h*w*length, 4), int64, the last axis fastest."""
    import torch

    axes = (torch.arange(size, device=device) for size in (t, h, w, length))
    return torch.cartesian_prod(*axes)
