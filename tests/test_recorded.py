"""Recorded graphs: other values in, results of their own out, whatever lies where. The stand-in plays back by running again.

That is what a recording does, on the tensors that it was made with; what a card makes of it is in `test_gpu_compiled.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_compiled import Blocks, equal
from torch import Tensor

from outsize.layers.compiled import BlockCompiler
from outsize.layers.recorded import MOST_RECORDINGS, Arena, RecordedGraph


class Replays:
    """Plays back by running again."""

    def __init__(self) -> None:
        self.num_recorded = self.num_launched = self.num_rooms = 0

    def make_room(self) -> None:
        self.num_rooms += 1

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()  # finds what it leaves; values of this run must not matter

        def replay() -> None:
            self.num_launched += 1
            run()

        return replay


def drawn(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def test_every_launch_has_its_own_values_and_results_that_later_ones_leave_alone() -> None:
    def run(x: Tensor, weight: Tensor, y: Tensor) -> list[Tensor]:
        return [x @ weight, y * 2, x + 1]

    recorder = Replays()
    graph = RecordedGraph(run, recorder, Arena())
    weight = drawn((4, 4))[0]
    kept: list[tuple[Sequence[Tensor], list[Tensor]]] = []
    for seed in range(5):
        x, y = drawn((3, 4), (3, 4), seed=seed)
        kept.append((graph([x, weight, y], [False, True, False]), run(x, weight, y)))
    for found, wanted in kept:
        assert equal(list(found), wanted)
    assert (recorder.num_recorded, recorder.num_launched, recorder.num_rooms) == (1, 4, 1)


def test_what_is_fixed_is_read_where_it_lies() -> None:
    """A slot of a ring is filled again and again; a resident block lies elsewhere for good."""
    recorder = Replays()
    graph = RecordedGraph(lambda x, weight: [x * weight], recorder, Arena())
    slots = drawn((8,), (8,))
    x = drawn((8,), seed=9)[0]
    for round_ in range(3):
        for slot in slots:
            slot.fill_(round_ + 2.0)
            assert torch.equal(graph([x, slot], [False, True])[0], x * (round_ + 2.0))
    assert recorder.num_recorded == len(slots)


def test_results_that_are_arguments_or_views_of_them_are_not_mixed_up() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, x, y.t(), y]

    graph = RecordedGraph(run, Replays(), Arena())
    for seed in range(3):
        x, y = drawn((4, 4), (4, 4), seed=seed)
        assert equal(list(graph([x, y], [False, False])), run(x, y))


def test_arguments_may_be_expanded_sliced_transposed_or_empty() -> None:
    def run(*args: Tensor) -> list[Tensor]:
        return [one * 3 for one in args]

    graph = RecordedGraph(run, Replays(), Arena())
    for seed in range(3):
        wide, row = drawn((6, 10), (1, 5), seed=seed)
        given = [wide[:, 2:7], row.expand(6, 5), wide.t(), wide[:0], wide[0, 0]]
        found = graph(given, [False] * len(given))
        assert equal(list(found), run(*given))


def test_more_places_than_are_kept_are_launched_one_by_one() -> None:
    recorder = Replays()
    graph = RecordedGraph(lambda weight: [weight + 1], recorder, Arena())
    weights = drawn(*[(2,)] * (MOST_RECORDINGS + 5))
    for _ in range(2):
        for weight in weights:
            assert torch.equal(graph([weight], [True])[0], weight + 1)
    assert recorder.num_recorded == MOST_RECORDINGS


def test_the_arena_is_shared_and_given_back() -> None:
    arena = Arena()
    first = arena.places(drawn((4,), (4,), (2,)))
    again = arena.places(drawn((2,), (4,), seed=1))
    assert again[1] is first[0]
    assert again[0] is first[2]
    assert len({id(one) for one in first}) == 3
    assert arena.num_bytes() == 4 * (4 + 4 + 2)
    arena.clear()
    assert arena.num_bytes() == 0


@pytest.mark.parametrize("fmt", ["plain", "nf4"])
def test_blocks_with_recorded_kernels_have_the_gradients_of_eager_ones(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    recorder = Replays()
    compiler = BlockCompiler(
        tmp_path, recorder=recorder, compile_graph=lambda graph, _examples: graph
    )
    recorded, eager = Blocks(compiler, fmt=fmt), Blocks(None, fmt=fmt)
    for tokens in (24, 48, 24, 24):
        assert equal(recorded.gradients(tokens), eager.gradients(tokens))
    assert recorder.num_launched > 0
    compiler.close()
    assert compiler.num_graphs == 0
