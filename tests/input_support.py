"""A small model of every shape of block call, and copies that are as late, or as early, as the waits allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.layers.block import EagerRunner, wrap_block
from outsize.layers.inputs import InputKeeper

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
WIDTH = 16
POISON = 255  # every bit set: NaN in fp32 and bf16, -1 in integers


class NoWeights:
    """A placement for blocks that own their weights."""

    def acquire(self, block: int) -> None: ...

    def release(self, block: int) -> None: ...


class EarlyCopies:
    """Copies as soon as they are asked for; a slot is filled with NaN as it is released."""

    def __init__(self, num_slots: int = 2) -> None:
        self.num_slots = num_slots
        self.num_copies = [0] * (num_slots + 1)
        self._targets: dict[int, list[Tensor]] = {}
        self._inputs_are_made = False
        self._read: set[int] = set()  # slots that work queued after their copies may read

    def open_(self, track: int) -> None:
        if track == self.num_slots:
            self._inputs_are_made = True
        self._read.discard(track)
        if track < self.num_slots:
            for target in self._targets.pop(track, []):
                target.fill_(POISON)

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        pairs = list(pairs)
        if track == self.num_slots:
            assert self._inputs_are_made, "a copy that may read inputs before they are computed"
            self._inputs_are_made = False
        assert track not in self._read, "a copy that may overwrite what a block still reads"
        self.num_copies[track] += 1
        self._targets[track] = [target for target, _ in pairs]
        for target, source in pairs:
            self.move(track, target, source)

    def move(self, track: int, target: Tensor, source: Tensor) -> None:  # noqa: ARG002
        target.copy_(source)

    def wait(self, track: int) -> None:
        if track < self.num_slots:
            self._read.add(track)

    def finish(self) -> None:
        """All is done."""


class LateCopies(EarlyCopies):
    """Copies only when a wait forces them, in order; what was freed meanwhile is overwritten by somebody else.

    Sources on the device are held weakly, as on a card, where the allocator knows nothing of a copy on another stream.
    """

    def __init__(self, num_slots: int = 2) -> None:
        super().__init__(num_slots)
        self._queue: list[tuple[int, Tensor, StorageWeakRef, Tensor | None, int]] = []

    def move(self, track: int, target: Tensor, source: Tensor) -> None:
        name = StorageWeakRef(source.untyped_storage())
        held = source if track < self.num_slots else None  # host memory lives on
        self._queue.append((track, target, name, held, source.storage_offset()))

    def wait(self, track: int) -> None:
        super().wait(track)
        while any(queued[0] == track for queued in self._queue):
            _, target, name, held, offset = self._queue.pop(0)
            storage = torch.UntypedStorage._new_with_weak_ptr(name.cdata)
            if storage is None:
                target.fill_(POISON)
                continue
            source = torch.empty(0, dtype=torch.uint8).set_(storage, offset, target.shape, (1,))
            target.copy_(source if held is None else held)


class Double(nn.Module):
    """Two streams in, two out, everything by keyword; as Flux.2's first blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, image: Tensor, text: Tensor, rotary: Any, mod: Tensor, extra: Any) -> Any:
        cos, sin = rotary
        joined = torch.cat([text, image], dim=1)
        turned = joined * cos + self.a(joined).tanh() * sin
        turned = torch.where(extra["mask"], turned, joined)
        text_out, image_out = turned.split([text.shape[1], image.shape[1]], dim=1)
        return text + self.b(text_out) * mod, image + self.b(image_out).tanh() * mod


class Single(nn.Module):
    """Gives text and image as slices of one tensor, and takes them so; as Flux.1's single blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.flags: list[tuple[bool, ...]] = []

    def forward(self, text: Tensor, image: Tensor, rotary: Any, mod: Tensor) -> Any:
        self.flags.append(tuple(one.requires_grad for one in (text, image, *rotary, mod)))
        joined = torch.cat([text, image], dim=1)
        joined = joined + self.a(joined).tanh() * rotary[0] * mod + rotary[1].sin()
        return joined[:, : text.shape[1]], joined[:, text.shape[1] :]


class Toy(nn.Module):
    """Double blocks, then single ones, with what all blocks share beside what each has for itself."""

    def __init__(self, num_double: int = 3, num_single: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.doubles = nn.ModuleList(Double() for _ in range(num_double))
        self.singles = nn.ModuleList(Single() for _ in range(num_single))
        self.shared: list[Tensor] = []

    def wrap(self, keeper: InputKeeper | None, around: Around | None = None) -> Toy:
        """Let every block run as blocks of a frozen model do; `around` is applied to each one's own forward."""

        def make_runner(module: nn.Module) -> EagerRunner:
            if around is not None:
                module.forward = around(module.forward)
            return EagerRunner(module)

        for block, module in enumerate([*self.doubles, *self.singles]):
            wrap_block(
                module, block, NoWeights(), recomputes=True, keeper=keeper, make_runner=make_runner
            )
        return self

    def forward(self, noisy: Tensor, text: Tensor) -> Tensor:
        batch, tokens = noisy.shape[0], noisy.shape[1] + text.shape[1]
        numbers = torch.arange(tokens * WIDTH, device=noisy.device).view(1, tokens, WIDTH)
        rotary = (numbers.float().cos(), numbers.float().sin())
        mask = (numbers % 7 != 0).expand(batch, -1, -1)
        mod = self.embed.bias.tanh()
        self.shared = [*rotary, mask]
        image, text = self.embed(noisy), self.embed(text)
        for block in self.doubles:
            text, image = block(
                image=image, text=text, rotary=rotary, mod=mod, extra={"mask": mask}
            )
        for block in self.singles:
            text, image = block(text, image, rotary, mod)
        return image


def batch_of(seed: int, tokens: int = 24, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Noisy image tokens and text tokens."""
    generator = torch.Generator().manual_seed(seed)
    noisy = torch.randn((batch, tokens, WIDTH), generator=generator)
    return noisy, torch.randn((batch, 8, WIDTH), generator=generator)


def gradients(toy: Toy, keeper: InputKeeper | None, batches: list[tuple[Tensor, Tensor]]) -> bytes:
    """One step over micro-batches, the bits of all gradients."""
    if keeper is not None:
        keeper.begin()
    toy.zero_grad()
    for noisy, text in batches:
        toy(noisy, text).square().mean().backward()
    grads = [one.grad for one in toy.parameters() if one.grad is not None]
    assert len(grads) == len(list(toy.parameters()))
    return torch.cat([one.flatten() for one in grads]).cpu().numpy().tobytes()
