"""What Flux.1 and Flux.2 share: the numbering of their blocks, and rules for Black Forest Labs' own single files.

Their files fuse query, key and value into one matrix, call the scale of a query's norm `query_norm.scale`, and hold
shift before scale in the last modulation, where diffusers' classes expect scale before shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from outsize.base.layout import Rule
from outsize.families._specs import Specs, within

# ComfyUI's checkpoints keep the model below this path; BFL's own files have no prefix.
PREFIXES = ("", "model.diffusion_model.")

DOUBLE = ("transformer_blocks.{i}", "double_blocks.{i}")
SINGLE = ("single_transformer_blocks.{i}", "single_blocks.{i}")


class Dimensions(Protocol):
    """What shapes depend on."""

    @property
    def width(self) -> int:
        """Width of the streams."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def num_double(self) -> int:
        """Double blocks."""

    @property
    def num_single(self) -> int:
        """Single blocks."""

    @property
    def joint_width(self) -> int:
        """Width of a text embedding."""

    @property
    def in_channels(self) -> int:
        """Channels of a token."""

    @property
    def has_guidance(self) -> bool:
        """Whether guidance is embedded."""


def block_paths(row: Dimensions) -> tuple[str, ...]:
    """Module paths: double blocks are numbered first, then single ones."""
    return (
        *(DOUBLE[0].format(i=i) for i in range(row.num_double)),
        *(SINGLE[0].format(i=i) for i in range(row.num_single)),
    )


def block_specs(row: Dimensions, double: Specs, single: Specs) -> Specs:
    """Every tensor of all blocks, given those of one of each kind."""
    each = [double] * row.num_double + [single] * row.num_single
    return tuple(
        spec
        for block, (path, specs) in enumerate(zip(block_paths(row), each, strict=True))
        for spec in within(path, specs, block=block)
    )


def modules(
    pairs: Mapping[str, str], leaves: Iterable[str], under: tuple[str, str] | None = None
) -> tuple[Rule, ...]:
    """One rule for each leaf ("weight", "bias") of each module, ours -> theirs."""
    ours_at, theirs_at = ("", "") if under is None else (f"{under[0]}.", f"{under[1]}.")
    return tuple(
        Rule(f"{ours_at}{ours}.{leaf}", f"{theirs_at}{theirs}.{leaf}")
        for ours, theirs in pairs.items()
        for leaf in leaves
    )


def scales(pairs: Mapping[str, str], under: tuple[str, str]) -> tuple[Rule, ...]:
    """Rules for RMS norms, whose weight they call scale."""
    return tuple(
        Rule(f"{under[0]}.{ours}.weight", f"{under[1]}.{theirs}.scale")
        for ours, theirs in pairs.items()
    )


def fused(
    parts: Iterable[str], theirs: str, leaves: Iterable[str], under: tuple[str, str]
) -> tuple[Rule, ...]:
    """Rules for modules that are the equal row slabs of one of theirs, in order."""
    names = tuple(parts)
    return tuple(
        Rule(f"{under[0]}.{ours}.{leaf}", f"{under[1]}.{theirs}.{leaf}", part=(k, len(names)))
        for k, ours in enumerate(names)
        for leaf in leaves
    )


def last_modulation(leaves: Iterable[str]) -> tuple[Rule, ...]:
    """Rules for the modulation before the output projection, whose halves are swapped."""
    return tuple(
        Rule(f"norm_out.linear.{leaf}", f"final_layer.adaLN_modulation.1.{leaf}", is_swapped=True)
        for leaf in leaves
    )


def double_attention(leaves: Iterable[str]) -> tuple[Rule, ...]:
    """Rules for the joint attention of double blocks, the same in both generations."""
    leaves = tuple(leaves)
    return (
        *fused(("attn.to_q", "attn.to_k", "attn.to_v"), "img_attn.qkv", leaves, DOUBLE),
        *fused(
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "txt_attn.qkv",
            leaves,
            DOUBLE,
        ),
        *modules(
            {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}, leaves, DOUBLE
        ),
        *scales(
            {
                "attn.norm_q": "img_attn.norm.query_norm",
                "attn.norm_k": "img_attn.norm.key_norm",
                "attn.norm_added_q": "txt_attn.norm.query_norm",
                "attn.norm_added_k": "txt_attn.norm.key_norm",
            },
            DOUBLE,
        ),
        *scales({"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}, SINGLE),
    )
