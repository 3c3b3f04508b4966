"""Block inputs in host memory: the same bits as on the device, freed in time, whatever the copies' timing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_support
import pytest
import torch
from engine_support import make_tiny, tiny_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from input_support import EarlyCopies, LateCopies, Toy, batch_of, gradients
from run_support import checkpoint_bytes, train_here, write_recipe
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.base.errors import MachineFault
from outsize.devices._copies import DirectCopies, StreamCopies
from outsize.devices._host import HostBuffer
from outsize.devices.protocol import open_device
from outsize.layers.inputs import SavedInputs
from outsize.layers.model import FrozenModel
from outsize.layers.offload import OffloadedInputs

CPU = open_device("cpu")
MIN_BYTES = 256
COPIES = (DirectCopies, EarlyCopies, LateCopies)
STEPS = [[batch_of(0), batch_of(1)], [batch_of(2)], [batch_of(3, tokens=8)], [batch_of(4)]]


def offloaded(copies: Any = None, **options: Any) -> OffloadedInputs:
    """A keeper for tensors as small as the tests', in chunks smaller than some of them."""
    options = {"min_bytes": MIN_BYTES, "chunk_bytes": 2048} | options
    return OffloadedInputs(CPU, copies=copies, **options)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """Each step's gradients where autograd keeps the inputs."""
    toy = Toy().wrap(None)
    return [gradients(toy, None, step) for step in STEPS]


@pytest.mark.parametrize("make", COPIES)
def test_gradients_are_those_of_inputs_kept_on_the_device_bit_for_bit(
    make: Callable[[], Any], expected: list[bytes]
) -> None:
    """Micro-batches, other shapes and back again; two streams, slices of one tensor, keywords, dictionaries."""
    keeper = offloaded(make())
    toy = Toy().wrap(keeper)
    assert [gradients(toy, keeper, step) for step in STEPS] == expected
    assert keeper.host_bytes() > 0


class ForgetsTheCopyOut(OffloadedInputs):
    """Frees an input without waiting for its copy."""

    def _let_go(self, kept: Any) -> None:
        kept.host_start, start = None, kept.host_start
        super()._let_go(kept)
        kept.host_start = start


class ReleasesTooEarly(OffloadedInputs):
    """Lets a slot be overwritten while its block still runs."""

    def take(self, handle: Any, saved: Any) -> tuple[Tensor, ...]:
        taken = super().take(handle, saved)
        if handle.slot is not None:
            self._free(handle.slot)
        return taken


class ForgetsTheCopyIn(LateCopies):
    """Lets a block run before its inputs have come."""

    def wait(self, track: int) -> None:
        if track == self.num_slots:
            super().wait(track)


@pytest.mark.parametrize(
    ("kind", "copies"),
    [
        (ForgetsTheCopyOut, LateCopies),
        (ReleasesTooEarly, EarlyCopies),
        (ReleasesTooEarly, LateCopies),
        (OffloadedInputs, ForgetsTheCopyIn),
    ],
)
def test_a_missing_wait_is_seen(
    kind: type[OffloadedInputs], copies: type[EarlyCopies], expected: list[bytes]
) -> None:
    """The doubles would be worth nothing if a wrong keeper passed them."""
    keeper = kind(CPU, copies=copies(), min_bytes=MIN_BYTES)
    toy = Toy().wrap(keeper)
    assert gradients(toy, keeper, STEPS[0]) != expected[0]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_comes_back_has_the_bits_strides_and_storage_of_what_was_kept(
    data: st.DataObject,
) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)

    def draw() -> tuple[Tensor, ...]:
        size = data.draw(st.integers(1, 40))
        whole = torch.randint(0, 2, (size, 6, 5)).to(data.draw(st.sampled_from(dtypes)))
        first = data.draw(st.integers(0, size - 1))
        views = (
            whole,
            whole[first:],
            whole[:, 2:4],
            whole.transpose(0, 2),
            whole[:1].expand(3, 6, 5),
        )
        places = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        return tuple(views[place] for place in places)  # fmt: skip

    blocks = [draw() + draw() for _ in range(data.draw(st.integers(1, 7)))]
    copies = data.draw(st.sampled_from(COPIES))()
    keeper = offloaded(copies, min_bytes=data.draw(st.sampled_from([1, 200])))
    wanted = [tuple(one.clone() for one in block) for block in blocks]
    strides = [[one.stride() for one in block] for block in blocks]
    kept = [keeper.keep(place, block) for place, block in enumerate(blocks)]
    del blocks
    for (saved, handle), clones, steps in zip(kept[::-1], wanted[::-1], strides[::-1], strict=True):
        for one, clone, stride in zip(keeper.take(handle, saved), clones, steps, strict=True):
            assert one.dtype == clone.dtype
            assert one.stride() == stride
            assert torch.equal(one, clone)
        keeper.release(handle)


def test_an_input_is_free_when_the_block_two_later_runs() -> None:
    """That is what it is for: device memory does not grow with the number of blocks."""
    keeper = offloaded(LateCopies())
    alive: list[int] = []
    names: list[StorageWeakRef] = []

    def transform(inner: Callable[..., Any]) -> Callable[..., Any]:
        def counting(text: Tensor, image: Tensor, *rest: Any) -> Any:
            alive.append(sum(not one.expired() for one in names))
            names.append(StorageWeakRef(image.untyped_storage()))
            return inner(text, image, *rest)

        return counting

    toy = Toy(0, 8).wrap(keeper, around=transform)
    keeper.begin()
    loss = toy(*batch_of(0)).mean()
    # of block i's predecessors only i - 1 is held as block i runs; block 0's text and image are two tensors
    assert alive == [0, 1, 1, 1, 1, 1, 1, 1]
    del names[:]
    loss.backward()


def test_what_blocks_share_is_kept_once_and_never_copied() -> None:
    copies = EarlyCopies()
    keeper = offloaded(copies)
    toy = Toy(0, 6).wrap(keeper)
    keeper.begin()
    loss = toy(*batch_of(0)).mean()
    tokens = 2 * (24 + 8)
    own = 6 * tokens * 16 * 4  # text and image of each block, fp32
    assert keeper._sent_bytes == own - own // 6  # the last block's are still here
    assert copies.num_copies == [0, 0, 5]
    assert {one.data_ptr() for one in toy.shared[:2]} == set(keeper._shared)
    loss.backward()
    # the last two are on the device at the turn
    assert copies.num_copies == [2, 2, 5]
    assert not keeper._shared
    assert not keeper._kept


def test_tables_that_alternate_between_blocks_are_recognised() -> None:
    """Language models give odd and even layers different masks."""
    keeper = offloaded()
    masks = (torch.rand(500), torch.rand(500))
    handles = [keeper.keep(block, (torch.rand(300), masks[block % 2])) for block in range(6)]
    assert {one.data_ptr() for one in masks} == set(keeper._shared)
    for block, (saved, handle) in reversed(list(enumerate(handles))):
        assert keeper.take(handle, saved)[1].data_ptr() == masks[block % 2].data_ptr()
        keeper.release(handle)


def test_small_tensors_and_parameters_are_left_to_autograd() -> None:
    keeper = offloaded()
    large, small = torch.rand(64), torch.rand(63)
    parameter = torch.nn.Parameter(torch.rand(1000))
    saved, _ = keeper.keep(0, (large, small, parameter))
    assert saved[0] is None
    assert saved[1] is small
    assert saved[2] is parameter


def test_restored_inputs_ask_for_gradients_as_the_kept_ones_did() -> None:
    keeper = offloaded()
    toy = Toy(1, 5).wrap(keeper)
    keeper.begin()
    toy(*batch_of(0)).mean().backward()
    assert [one.flags for one in toy.singles] == [[(True, True, False, False, True)] * 2] * 5


def test_without_gradients_nothing_is_kept() -> None:
    keeper = offloaded(copies := EarlyCopies())
    toy = Toy().wrap(keeper)
    with torch.no_grad():
        toy(*batch_of(0))
    assert not keeper._kept
    assert copies.num_copies == [0, 0, 0]
    assert keeper.host_bytes() == keeper.device_bytes() == 0


def test_host_memory_grows_with_the_largest_shape_and_is_reused() -> None:
    """Growth is stated in whole chunks; a smaller shape, or the same again, takes no more."""
    keeper = offloaded(chunk_bytes=1024)
    toy = Toy(0, 4).wrap(keeper)
    found = []
    for tokens in (24, 24, 8, 56, 24):
        gradients(toy, keeper, [batch_of(0, tokens)] * 2)
        found.append((keeper.host_bytes(), keeper.device_bytes()))
    per_block = [2 * (tokens + 8) * 16 * 4 for tokens in (24, 24, 24, 56, 56)]
    assert found == [(3 * size, 2 * size) for size in per_block]
    keeper.close()
    assert keeper.host_bytes() == keeper.device_bytes() == 0


class FaultError(Exception):
    """Thrown into a run."""


@pytest.mark.parametrize("make", [EarlyCopies, LateCopies])
@pytest.mark.parametrize("call", range(1, 14))
def test_a_step_after_a_failed_one_is_right(
    make: Callable[[], Any], call: int, expected: list[bytes]
) -> None:
    """Out of memory in any block's forward (1 to 7) or backward (8 to 14), then the next step begins."""
    calls = 0

    def transform(inner: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise FaultError
            return inner(*args, **kwargs)

        return failing

    keeper = offloaded(make())
    toy = Toy().wrap(keeper, around=transform)
    with pytest.raises(FaultError) as raised:  # its traceback keeps the failed graph alive
        gradients(toy, keeper, STEPS[0])
    assert [gradients(toy, keeper, step) for step in STEPS] == expected
    assert raised.type is FaultError


def test_a_step_after_one_that_ran_out_of_memory_for_slots_is_right(
    expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = offloaded(LateCopies())
    toy = Toy().wrap(keeper)
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_fit_slots", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            gradients(toy, keeper, STEPS[0])
    assert [gradients(toy, keeper, step) for step in STEPS] == expected


def _out_of_memory(num_bytes: int) -> None:
    raise torch.OutOfMemoryError(f"{num_bytes} bytes")


def test_a_forward_whose_backward_never_comes_leaves_no_trace(expected: list[bytes]) -> None:
    keeper = offloaded(LateCopies())
    toy = Toy().wrap(keeper)
    keeper.begin()
    abandoned = toy(*batch_of(0)).mean()
    assert [gradients(toy, keeper, step) for step in STEPS] == expected
    with pytest.raises(RuntimeError, match=r"block 6 are gone: they are kept for one backward"):
        abandoned.backward()


def test_two_forwards_before_their_backwards_do_not_meet(expected: list[bytes]) -> None:
    """An objective may predict twice before it differentiates; host memory then holds both."""
    keeper = offloaded(LateCopies())
    toy = Toy().wrap(keeper)
    keeper.begin()
    losses = [toy(*batch).square().mean() for batch in STEPS[0]]
    for loss in losses:  # in the order of the reference, which adds the first one's gradients first
        loss.backward()
    grads = torch.cat([one.grad.flatten() for one in toy.parameters() if one.grad is not None])
    assert grads.numpy().tobytes() == expected[0]


def test_a_block_whose_backward_is_left_out_does_not_stop_the_others() -> None:
    """Blocks may feed outputs that the loss does not see: their turn never comes."""
    keeper = offloaded(LateCopies())
    tensors = [(torch.full((300,), float(block)),) for block in range(9)]
    handles = [keeper.keep(block, one)[1] for block, one in enumerate(tensors)]
    for block in (5, 3, 4, 0):
        (found,) = keeper.take(handles[block], (None,))
        assert torch.equal(found, tensors[block][0])
        keeper.release(handles[block])


def test_slots_may_grow_while_one_is_filled_for_a_coming_block() -> None:
    """A larger picture's forward between another one's forward and backward."""
    keeper = offloaded(copies := LateCopies())
    tensors = [(torch.full((300 if block < 6 else 900,), float(block)),) for block in range(9)]
    handles = [keeper.keep(block, one)[1] for block, one in enumerate(tensors[:6])]
    keeper.take(handles[5], (None,))
    assert copies.num_copies[:2] == [1, 1]
    keeper.release(handles.pop())
    handles += [keeper.keep(block, tensors[block])[1] for block in (6, 7, 8)]
    assert keeper.device_bytes() == 2 * 3840  # 900 fp32 numbers, at a multiple of 256
    for handle in reversed(handles):
        (found,) = keeper.take(handle, (None,))
        assert torch.equal(found, tensors[handle.block][0])
        keeper.release(handle)


def test_copies_on_a_stream_follow_what_opened_their_track_and_precede_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls on a card, told by stand-ins for its streams and events."""
    seen: list[tuple[str, ...]] = []

    class Event:
        count = 0

        def __init__(self) -> None:
            Event.count += 1
            self.name = f"event {Event.count}"

        def record(self, stream: Stream) -> None:
            seen.append(("record", self.name, stream.name))

    class Stream:
        def __init__(self, _device: Any, name: str = "copies") -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            seen.append((self.name, "waits for", event.name))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    copies = StreamCopies(torch.device("cpu"), 2)  # events 1 and 2 open tracks, 3 and 4 end copies
    target = torch.zeros(3)
    copies.open_(1)
    copies.copy(1, [(target, torch.ones(3))])
    copies.wait(1)
    assert target.tolist() == [1, 1, 1]
    assert seen == [
        ("record", "event 2", "computing"),
        ("copies", "waits for", "event 2"),
        ("record", "event 4", "copies"),
        ("computing", "waits for", "event 4"),
    ]


def test_an_input_that_is_changed_in_place_is_noticed() -> None:
    """As autograd notices it: the copy may have run before or after the change."""
    keeper = offloaded()
    changed = torch.rand(300)
    _, handle = keeper.keep(3, (torch.rand(3), changed))
    changed.add_(1)
    with pytest.raises(RuntimeError, match=r"inputs \[1\] of block 3 .* were changed in place"):
        keeper.take(handle, (torch.rand(3), None))


def test_a_system_that_refuses_to_pin_is_named_with_what_it_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = 2

    def host_buffer(num_bytes: int) -> HostBuffer:
        nonlocal left
        left -= 1
        why = "" if left >= 0 else "page-locking 1.0 MiB was refused (error 2 of the runtime)"
        return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8), num_bytes, why)

    monkeypatch.setattr(type(CPU), "host_buffer", lambda _, num_bytes: host_buffer(num_bytes))
    keeper = offloaded(chunk_bytes=1 << 20)
    for block in range(3):
        keeper.keep(block, (torch.rand(200_000),))
    with pytest.raises(MachineFault, match=r"1.0 MiB was refused .* with 2.0 MiB pinned"):
        keeper.keep(3, (torch.rand(200_000),))


def test_a_transformed_forward_is_what_runs_both_times() -> None:
    """A compiler's function must serve the second run too, or kept and recomputed numbers differ."""
    names: list[str] = []

    def transform(inner: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            names.append(type(inner.__self__).__name__)  # type: ignore[attr-defined]
            return inner(*args, **kwargs)

        return traced

    plain, traced = Toy(1, 1).wrap(None), Toy(1, 1).wrap(SavedInputs(), around=transform)
    assert gradients(traced, None, STEPS[0][:1]) == gradients(plain, None, STEPS[0][:1])
    assert names == ["Double", "Single", "Single", "Double"]


@pytest.mark.parametrize("family", ["flux1", "flux2"])
@pytest.mark.parametrize("make", [EarlyCopies, LateCopies])
def test_upstream_blocks_get_the_same_gradients(
    family: str, make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny(tmp_path, family, ("nf4", {"group": 64}))
    inputs = tiny_inputs(base)
    inputs["noisy_BCHW"].requires_grad_()
    found = []
    for keeper in (SavedInputs(), offloaded(make())):
        monkeypatch.setattr(
            engine_support, "FrozenModel", functools.partial(FrozenModel, keeper=keeper)
        )
        model = base.open("stream")
        for _ in range(2):
            inputs["noisy_BCHW"].grad = None
            model.begin("train")
            base.family.predict(base.variant, model.module, **inputs).square().mean().backward()
            found.append(inputs["noisy_BCHW"].grad)
        assert isinstance(keeper, SavedInputs) or keeper.host_bytes() > 0
        model.close()
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_a_training_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, keepers = [], []
    build = FrozenModel.__init__

    def with_keeper(self: FrozenModel, *args: Any, **kwargs: Any) -> None:
        keepers.append(offloaded(LateCopies()))
        build(self, *args, **kwargs | {"keeper": keepers[-1]})

    for name in ("device", "host"):
        recipe = write_recipe(
            tmp_path, name=name, model=tmp_path / "model" if found else None,
            train={"steps": 3, "accumulate": 2},
            placement={"kind": "stream", "slots": 2}, checkpoints={"every": 100},
        )  # fmt: skip
        found.append(checkpoint_bytes(train_here(recipe)[1]))
        monkeypatch.setattr(FrozenModel, "__init__", with_keeper)
    assert found[0] == found[1]
    assert any(one._copies.num_copies[-1] for one in keepers)
