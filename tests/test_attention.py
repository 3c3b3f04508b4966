"""Ways to attend: tiles and flash against a mask of all pairs, alone and inside the language families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_support import TinyBase, make_tiny
from language_support import FP32, NAMES, attach, logits_of, loss_of, rows, upstream_model
from living_bytes import LivingBytes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outsize.families import _attention as attention
from outsize.families._packed import boundaries, several_documents, starts
from outsize.families._tiled_attention import tiled_attention, tiles
from outsize.layers._merging import merge_equal_
from outsize.layers.compiled import BlockCompiler

LONG = 40  # several windows of the tiny Gemma


def drawn(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values. sizes: rows, key heads, query heads of each, tokens, width."""
    batch, heads, shared, tokens, width = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, count, tokens, width) for count in (heads * shared, heads, heads)]
    return [torch.randn(one, generator=generator).to(dtype).requires_grad_() for one in shapes]


def segments_of(batch: int, tokens: int) -> Tensor:
    """Documents of some 40 tokens, one of a single token, and padding at the end of all rows but the first."""
    generator = torch.Generator().manual_seed(5)
    begins = torch.rand(batch, tokens, generator=generator) < 1 / 40
    begins[:, 7:9] = True
    found = begins.cumsum(1)
    found[1:, -9:] = -1
    return found.int()


def plain(  # noqa: PLR0917 - all of a formula
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, segments: Tensor | None
) -> Tensor:
    """By a mask of all pairs."""
    place = torch.arange(q.shape[2])
    sees = place <= place[:, None]
    if window is not None:
        sees &= place > place[:, None] - window
    if segments is not None:
        sees = (sees & (segments[:, :, None] == segments[:, None, :]))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)


def both(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """A result with its gradients."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight)]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("window", [None, 8, 130, 200, 5000])
@pytest.mark.parametrize("tile_bytes", [1 << 14, 1 << 18, 1 << 30])
def test_tiles_give_what_a_mask_of_all_pairs_gives(
    tile_bytes: int, window: int | None, *, is_packed: bool
) -> None:
    """Output and gradients in fp64, whatever divides: 700 tokens are no multiple of anything that tiles are."""
    q, k, v = inputs = drawn((2, 3, 2, 700, 8))
    segments = segments_of(2, 700) if is_packed else None
    reach = None if segments is None else starts(segments)
    out = tiled_attention(q, k, v, scale=0.3, window=window, starts_BT=reach, tile_bytes=tile_bytes)
    truth = both(plain(q, k, v, 0.3, window, segments), inputs)
    for ours, theirs in zip(both(out, inputs), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_tiles_leave_out_keys_that_nobody_sees() -> None:
    """Of all pairs of 8192 tokens: little more than half without a window, an eighth and some with one of 1024."""
    for window, most in ((None, 0.57), (1024, 0.17)):
        area = sum(
            (one.last - one.first) * (one.last - one.low)
            for one in tiles(torch.Size((1, 1, 8192, 512)), window, 1 << 28)
        )
        assert area / 8192**2 < most


@pytest.mark.parametrize("window", [None, 256])
def test_memory_of_tiles_grows_with_the_row_not_with_its_square(window: int | None) -> None:
    """All scores of 8 heads and 2048 tokens would be 128 MiB in fp32; a tile may be 1 MiB, of 1 MiB of queries."""
    inputs = drawn((1, 4, 2, 2048, 16), torch.float32)
    tile = 8 << 20
    with LivingBytes() as memory:
        out = tiled_attention(*inputs, scale=0.25, window=window, tile_bytes=tile)
        torch.autograd.grad(out, inputs, out.detach())
    assert memory.largest <= tile
    assert memory.peak <= 4.5 * tile + 40 * out.numel()


def test_a_tile_of_a_long_row_has_fewer_queries() -> None:
    """The shape of Gemma's full layers: at 65536 tokens a key head's tile would be 16 GiB otherwise."""
    for tokens, last in ((2048, 256), (8192, 1024), (65536, 128)):
        tile = next(tiles(torch.Size((4, 8, tokens, 512)), None, 1 << 28))
        assert tile.last == last
        assert tile.pairs.stop * 8 * last * tokens * 4 <= 1 << 28


def test_scores_are_not_kept_from_recompute_to_gradient() -> None:
    """A traced block that merged the two would hold all of them at once."""
    inputs = [one.detach() for one in drawn((1, 1, 2, 1024, 16), torch.float32)]

    def run(*given: Tensor) -> list[Tensor]:
        own = [one.detach().requires_grad_() for one in given]
        with torch.enable_grad():
            out = tiled_attention(*own, scale=0.25)
            return list(torch.autograd.grad(out, own, torch.ones_like(out)))

    graph = make_fx(run, tracing_mode="fake")(*inputs)
    merge_equal_(graph.graph)
    places = {node: number for number, node in enumerate(graph.graph.nodes)}
    # of two million pairs a tile has at most an eighth, in keys that half of the queries see
    wide = [one for one in places if _numel(one) >= 2 * 128 * 128]
    assert len(wide) > 16
    lives = [max((places[user] for user in one.users), default=0) - places[one] for one in wide]
    assert max(lives) < len(places) / 16


def _numel(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    # scores alone have two sides of tokens
    if not isinstance(value, Tensor) or value.ndim < 2 or min(value.shape[-2:]) < 128:
        return 0
    return value.numel()


# --- flash, whose operator has no kernel on processors ---------------------------------------------


def reference(  # noqa: PLR0917 - the operator's order
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins_q: Tensor | None,
    begins_k: Tensor | None,
    most_q: int,
    most_k: int,
    dropout: float,
    is_causal: bool,  # noqa: FBT001 - as above
    has_mask: bool,  # noqa: FBT001 - as above
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[Tensor]:
    """What aten::_flash_attention_forward says it computes, document by document."""
    assert begins_q is begins_k
    assert most_q == most_k
    assert (dropout, is_causal, has_mask) == (0.0, True, False)
    assert window_size_right == (None if window_size_left is None else 0)
    window = None if window_size_left is None else window_size_left + 1
    if begins_q is None:
        turned = [one.transpose(1, 2) for one in (query, key, value)]
        return (plain(*turned, scale, window, None).transpose(1, 2),)
    assert begins_q.dtype == torch.int32
    found = []
    for first, last in zip(begins_q[:-1].tolist(), begins_q[1:].tolist(), strict=True):
        assert last - first <= most_q
        own = [one[first:last].transpose(0, 1)[None] for one in (query, key, value)]
        if last > first:
            found.append(plain(*own, scale, window, None)[0].transpose(0, 1))
    return (torch.cat(found),)


@pytest.fixture(params=["tiled", "flash"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend as on a card: all in tiles, or narrow heads by flash."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", reference)
    chosen: Callable[..., str] = {
        "tiled": lambda *_: "tiled",
        "flash": lambda _kind, _index, _dtype, width: "flash" if width < 32 else "tiled",
    }[request.param]
    monkeypatch.setattr(attention, "_way", chosen)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyBase]:
    root = tmp_path_factory.mktemp("bases")
    return {name: make_tiny(root / name, name, FP32) for name in NAMES}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, in the norm."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(bases: dict[str, TinyBase], name: str) -> None:
    """Rows of one document, over several windows, with padding behind."""
    base, batch = bases[name], rows([[LONG], [LONG]], padding=3)
    model, upstream = base.open("stream"), upstream_model(name, base.decoded())
    with torch.no_grad():
        model.begin("forward")
        ours = logits_of(base, model.module, batch)[:, :LONG]
        theirs = upstream(input_ids=batch["input_ids"][:, :LONG], use_cache=False).logits
    assert distance(ours, theirs) < 1e-5


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_cost_and_teach_what_they_do_with_a_mask(
    bases: dict[str, TinyBase], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and every gradient, documents longer and shorter than the window, and padding."""
    base, batch = bases[name], rows([[11, 1, 19], [3, 25, 3]], padding=5)
    found = []
    for chosen in (attention._way, lambda *_: "masked"):
        monkeypatch.setattr(attention, "_way", chosen)
        model = base.open("resident")
        adapter = attach(base, model)
        loss = loss_of(base, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append({key: one.grad for key, one in adapter.parameters().items()})
        found[-1]["loss"] = loss.detach()
    for key, one in found[0].items():
        assert one is not None
        assert distance(one, found[1][key]) < 1e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_blocks_share_a_graph_for_each_kind_whatever_documents_there_are(
    bases: dict[str, TinyBase], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two and of three documents run through the same graphs, for their shapes are the same."""
    monkeypatch.setattr(attention, "_way", lambda *_: "tiled")
    base = bases[name]
    compiler = BlockCompiler(tmp_path, compile_graph=lambda graph, _examples: graph)
    losses = []
    for options in ({}, {"make_runner": compiler}):
        model = base.open("resident", **options)
        attach(base, model)
        for documents in ([9, 18], [9, 8, 10]):
            losses.append(loss_of(base, model, rows([documents])))
            losses[-1].backward()  # type: ignore[no-untyped-call]
    assert compiler.num_graphs == 2 * len(set(base.family.layer_kinds("tiny")))
    assert losses[2].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert losses[3].item() == pytest.approx(losses[1].item(), rel=1e-6)


def test_flash_can_be_traced_with_its_gradient() -> None:
    """Documents are an argument of the traced graph, so one graph serves all packings; nothing in it is a square of tokens."""

    def run(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, grad: Tensor) -> list[Tensor]:
        own = [one.detach().requires_grad_() for one in (q, k, v)]
        with torch.enable_grad():
            out = attention.flash(own[0], own[1], own[2], scale=1.0, window=100, boundaries=begins)
            return [out, *torch.autograd.grad(out, own, grad)]

    q = torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 512, 2, 64, dtype=torch.bfloat16)
    graph = make_fx(run, tracing_mode="fake")(q, k, k, torch.zeros(9, dtype=torch.int32), q)
    calls = {str(one.target): one for one in graph.graph.nodes if one.op == "call_function"}
    forward = calls["aten._flash_attention_forward.default"]
    assert forward.kwargs == {"scale": 1.0, "window_size_left": 99, "window_size_right": 0}
    assert calls["aten._flash_attention_backward.default"].kwargs == forward.kwargs
    shapes: list[Any] = [one.meta["val"] for one in graph.graph.nodes if "val" in one.meta]
    sizes = [one.numel() for one in shapes if isinstance(one, Tensor)]
    assert max(sizes) == q.numel()


def test_a_flash_kernel_that_knows_no_window_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial that decides tells right from wrong; an operator that refuses is not used either."""
    device = torch.device("cpu")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", reference)
    assert attention._flash_works(device, torch.bfloat16, 32)

    def without(*args: Any, scale: float, **_: Any) -> tuple[Tensor]:
        return reference(*args, scale=scale, window_size_left=None, window_size_right=None)

    def without_documents(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        if q.ndim == 4:
            return reference(q, k, v, *args, **options)
        options |= {"window_size_left": None, "window_size_right": None}
        return [reference(q[None], k[None], v[None], None, None, *args[2:], **options)[0][0]]

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel")

    for wrong in (without, without_documents, refuses):
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", wrong)
        assert not attention._flash_works(device, torch.bfloat16, 32)


def test_boundaries_have_few_lengths_and_hold_every_document() -> None:
    """Each length is a shape, and each shape a graph."""
    lengths = set()
    for mean in (1, 3, 16, 40, 300, 1024):
        segments = (torch.arange(1024) // mean).int()[None].expand(2, -1)
        found = boundaries(segments)
        lengths.add(len(found))
        unique = found.unique_consecutive()
        wanted = [row * 1024 + one for row in range(2) for one in range(0, 1024, mean)]
        assert unique.tolist() == [*wanted, 2048]
    assert len(lengths) <= 3
    assert several_documents(torch.tensor([[0, 0, 1, -1]])) is not None
    assert starts(torch.tensor([[0, 0, 1, 1, -1, -1]])).tolist() == [[0, 0, 2, 2, 4, 4]]
