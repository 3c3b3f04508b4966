"""Which tensor goes into which format, and that what was left out is said."""

import pytest

from outsize.base.table import ShapeTable, TensorSpec
from outsize.formats._packing import LeftPlain, assign
from outsize.formats.protocol import make_format

PLAIN = make_format("plain", {"dtype": "bf16"})
FP32 = make_format("plain", {"dtype": "fp32"})
NF4 = make_format("nf4")
TABLE = ShapeTable(
    (
        TensorSpec("x_embedder.weight", (128, 64), "embed", is_linear=True),
        TensorSpec("blocks.0.attn.to_q.weight", (128, 128), "attention", 0, is_linear=True),
        TensorSpec("blocks.0.attn.to_q.bias", (128,), "attention", 0),
        TensorSpec("blocks.0.mlp.weight", (128, 100), "mlp", 0, is_linear=True),
        TensorSpec("blocks.0.norm.weight", (128,), "norm", 0),
        TensorSpec("blocks.0.conv.weight", (8, 8, 3, 3), "conv", 0),
        TensorSpec("bn.running_mean", (128,), "buffer"),
    )
)


def test_linears_inside_blocks_are_packed_and_the_rest_stays_plain() -> None:
    """Embedders and heads are small and sensitive; norms and biases are no matrices; statistics keep fp32."""
    packing = assign(TABLE, NF4, PLAIN)
    assert packing.formats == {
        "x_embedder.weight": PLAIN,
        "blocks.0.attn.to_q.weight": NF4,
        "blocks.0.attn.to_q.bias": PLAIN,
        "blocks.0.mlp.weight": PLAIN,
        "blocks.0.norm.weight": PLAIN,
        "blocks.0.conv.weight": PLAIN,
        "bn.running_mean": FP32,
    }
    assert list(packing.formats) == [spec.name for spec in TABLE]


def test_a_linear_the_format_cannot_hold_is_listed_with_the_reason() -> None:
    """Plan and journal print it: 4 bits asked for and 16 given must not be a surprise."""
    reason = "its 100 columns are no multiple of nf4's group of 64"
    assert assign(TABLE, NF4, PLAIN).left_plain == (
        LeftPlain("blocks.0.mlp.weight", (128, 100), reason),
    )
    assert assign(TABLE, PLAIN, PLAIN).left_plain == ()


def test_parts_are_those_of_the_format_assigned() -> None:
    """Sizes for the plan come from here."""
    packing = assign(TABLE, NF4, PLAIN)
    for spec in TABLE:
        assert packing.parts(spec.name) == packing.formats[spec.name].parts(spec.shape)
    assert (
        sum(part.num_bytes for part in packing.parts("blocks.0.attn.to_q.weight"))
        == 128 * 128 * 9 // 16
    )
    with pytest.raises(KeyError):
        packing.parts("no.such.weight")


def test_a_description_tells_packings_apart() -> None:
    """It is part of a store's key."""
    described = assign(TABLE, NF4, PLAIN).describe()
    assert described["linears"] == NF4.describe()
    assert described["left_plain"] == ["blocks.0.mlp.weight"]
    others = [assign(TABLE, make_format("nf4", {"group": 32}), PLAIN), assign(TABLE, NF4, FP32)]
    assert described not in [other.describe() for other in others]
