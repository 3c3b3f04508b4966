"""Compiled code is found again by what it was made from, and made anew when anything of that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from outsize.layers import _code
from outsize.layers._code import KeptCode, code_key, lift_constants_

TABLE = torch.tensor([1.0, 10.0, 100.0])


def traced(run: Callable[..., list[Tensor]], *examples: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    return graph


def looked_up(x: Tensor, at: Tensor) -> list[Tensor]:
    return [x * TABLE.index_select(0, at) + TABLE.sum()]


def example(*, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(float(rows)), torch.arange(rows) % 3


def test_constants_become_the_last_arguments() -> None:
    x, at = example()
    graph = traced(looked_up, x, at)
    constants = lift_constants_(graph)
    assert [torch.equal(one, TABLE) for one in constants] == [True]
    assert not [one for one in graph.graph.nodes if one.op == "get_attr"]
    assert not dict(graph.named_buffers())
    assert torch.equal(graph(x, at, *constants)[0], looked_up(x, at)[0])


def test_a_graph_without_constants_stays_as_it_is() -> None:
    graph = traced(lambda x: [x + 1], torch.ones(2))
    before = str(graph.graph)
    assert lift_constants_(graph) == []
    assert str(graph.graph) == before


def key(run: Callable[..., list[Tensor]], *examples: Tensor) -> str:
    graph = traced(run, *examples)
    return code_key(graph, [*examples, *lift_constants_(graph)])


def test_the_key_is_the_graph_and_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    x, at = example()
    same = key(looked_up, x, at)
    assert key(looked_up, x.clone() + 5, at) == same
    others = [
        key(lambda x, at: [x * TABLE.index_select(0, at) - TABLE.sum()], x, at),
        key(looked_up, *example(rows=5)),
        key(looked_up, x.double(), at),
        key(looked_up, torch.arange(8.0)[::2], at),
        key(lambda x, at: [*looked_up(x, at), x], x, at),
    ]
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    others.append(key(looked_up, x, at))
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    monkeypatch.setattr(_code, "_surroundings", lambda: ("another torch",))
    others.append(key(looked_up, x, at))
    assert len({same, *others}) == 1 + len(others)


def test_the_surroundings_hold_versions_and_our_own_kernels() -> None:
    found = _code._surroundings()
    assert torch.__version__ in found
    assert sum(len(one) == 64 for one in found) > 20


@pytest.mark.slow
def test_kept_code_is_found_by_the_next_start_and_made_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x, at = example()

    def start() -> tuple[KeptCode, Sequence[Tensor]]:
        code = KeptCode(tmp_path / "graphs")
        graph = traced(looked_up, x, at)
        constants = lift_constants_(graph)
        run = code(graph, [x, at, *constants])
        return code, run(x + 1, at, *constants)

    wanted = looked_up(x + 1, at)
    first, found = start()
    assert (first.num_compiled, first.num_found) == (1, 0)
    assert torch.allclose(found[0], wanted[0])
    again, found_again = start()
    assert (again.num_compiled, again.num_found) == (0, 1)
    assert torch.equal(found_again[0], found[0])
    (kept,) = (tmp_path / "graphs").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    damaged, found_anew = start()
    assert (damaged.num_compiled, damaged.num_found) == (1, 0)
    assert torch.equal(found_anew[0], found[0])
