"""An upstream module whose block linears read packed weights from a placement.

Small tensors of every block (norms, biases) and everything outside the blocks are on the device and stay; the packed
matrices are the placement's. `loading.py` brings both from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from outsize.base.table import ShapeTable
from outsize.layers.block import BlockRunner, EagerRunner, wrap_block
from outsize.layers.frozen import FrozenLinear
from outsize.layers.inputs import InputKeeper, SavedInputs
from outsize.weights.packet import Packet, view

if TYPE_CHECKING:
    from outsize.arithmetic.protocol import Arithmetic
    from outsize.formats.protocol import Format


class PacketHolder(Protocol):
    """What this module needs of a placement."""

    def put(self, block: int, packet: Tensor) -> None: ...

    def begin(self, sweep: Literal["forward", "train"]) -> None: ...

    def acquire(self, block: int) -> Tensor: ...

    def release(self, block: int) -> None: ...

    def device_bytes(self) -> int: ...

    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class Lent(Protocol):
    """Memory that somebody must be given back."""

    def release(self) -> None: ...


def freeze_linears_(
    module: nn.Module,
    table: ShapeTable,
    packing: Mapping[str, Format],
    compute: torch.dtype,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Replace, in place, every linear inside a block by a FrozenLinear of its format."""
    for spec in table.linears():
        parent_path, _, leaf = spec.module.rpartition(".")
        parent = module.get_submodule(parent_path)
        old = parent.get_submodule(leaf)
        assert isinstance(old, nn.Linear), (
            f"{spec.module} is a {type(old).__name__}, the table says linear"
        )
        new = FrozenLinear(
            old.in_features,
            old.out_features,
            has_bias=old.bias is not None,
            fmt=packing[spec.name],
            compute=compute,
            arithmetic=arithmetic,
        )
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            parent[int(leaf)] = new
        else:
            setattr(parent, leaf, new)


class FrozenModel:
    """The module, and the binding of its blocks to packets.

    compute: type of the small tensors and of activations. Buffers that the table lists stay fp32. keeper: of block inputs;
    autograd, unless another is given. arithmetic: of products with frozen matrices. make_runner: how each block is run,
    to compile it. on_host: tensors outside the blocks that stay in host memory, whoever reads them there.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        table: ShapeTable,
        block_paths: Sequence[str],
        packing: Mapping[str, Format],
        packets: Sequence[Packet],
        placement: PacketHolder,
        device: torch.device,
        compute: torch.dtype,
        recomputes: bool = True,
        keeper: InputKeeper | None = None,
        arithmetic: Arithmetic | None = None,
        make_runner: Callable[[nn.Module], BlockRunner] = EagerRunner,
        on_host: Collection[str] = (),
    ) -> None:
        self._on_host, self._lent = frozenset(on_host), list[Lent]()
        self.module, self.placement, self.packets = module, placement, packets
        self.keeper: InputKeeper = SavedInputs() if keeper is None else keeper
        self._table, self._device, self._compute = table, device, compute
        self._views: dict[tuple[int, int], list[tuple[FrozenLinear, dict[str, Tensor]]]] = {}
        freeze_linears_(module, table, packing, compute, arithmetic)
        self._runners = [
            wrap_block(
                module.get_submodule(path),
                block,
                self,
                recomputes=recomputes,
                keeper=self.keeper,
                make_runner=make_runner,
            )
            for block, path in enumerate(block_paths)
        ]

    def begin(self, sweep: Literal["forward", "train"]) -> None:
        """Say that the blocks will now be run upwards, or upwards and down again."""
        self.keeper.begin()
        self.placement.begin(sweep)

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Within the block nothing new is compiled: blocks run operation by operation; without gradients only."""
        for runner in self._runners:
            runner.write_out(is_wanted=True)
        try:
            yield
        finally:
            for runner in self._runners:
                runner.write_out(is_wanted=False)

    def acquire(self, block: int) -> None:
        """Bind a block's linears to its packet."""
        buffer = self.placement.acquire(block)
        key = (block, buffer.data_ptr())
        if key not in self._views:
            self._views[key] = self._make_views(block, buffer)
        for layer, parts in self._views[key]:
            layer.bind(parts)
        self._bound = self._views[key]

    def release(self, block: int) -> None:
        """Leave the block's linears without a weight."""
        for layer, _ in self._bound:
            layer.bind(None)
        self.placement.release(block)

    def row_squares(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """Squared lengths of the rows of frozen linears (out_features each), fp32, by module path: one way through the blocks."""
        wanted = {id(self._owner(path)): path for path in paths}
        found: dict[str, Tensor] = {}
        self.begin("forward")
        with torch.no_grad():
            for block in range(len(self.packets)):
                self.acquire(block)
                found |= {
                    wanted[id(layer)]: layer.row_squares()
                    for layer, _ in self._bound
                    if id(layer) in wanted
                }
                self.release(block)
        return {path: found[path] for path in paths}

    def load_small_(
        self,
        block: int | None,
        packet: Packet,
        buffer: Tensor,
        *,
        begin: int = 0,
        is_given: bool = False,
    ) -> None:
        """Copy the tensors of a packet that are no linears of blocks into the module.

        buffer: uint8, the packet's bytes from `begin` (a multiple of 256) on. is_given: nobody else will use it, so where all
        tensors are what the module wants they stay in it, and memory is taken once.
        """
        small = {
            entry.tensor: view(replace(entry, offset=entry.offset - begin), buffer)
            for entry in packet.entries
            if block is None or entry.offset >= packet.streamed_bytes
        }
        types = {name: self._type_of(name, value) for name, value in small.items()}
        is_kept = is_given and all(value.dtype == types[name] for name, value in small.items())
        for name, value in small.items():
            place = torch.device("cpu") if name in self._on_host else self._device
            self._set(name, value.to(place, types[name], copy=not is_kept))

    def keep_until_closed(self, memory: Lent) -> None:
        """Hold memory that tensors of this model lie in, and give it back when the model is closed."""
        self._lent.append(memory)

    def small_tensors(self) -> dict[str, Tensor]:
        """What the table lists beside the packed matrices and is meant to lie on the device, by name."""
        packed = {spec.name for spec in self._table.linears()} | self._on_host
        names = (spec.name for spec in self._table if spec.name not in packed)
        found = {name: self._tensor(name) for name in names}
        return {name: one for name, one in found.items() if one is not None}

    def without_weights(self) -> list[str]:
        """Parameters that were never loaded, the packed ones aside."""
        packed = {f"{spec.module}.weight" for spec in self._table.linears()}
        names = (name for name, one in self.module.named_parameters() if one.is_meta)
        return [name for name in names if name not in packed]

    def close(self) -> None:
        """Give the weights' memory back, whoever still knows the module."""
        for runner in self._runners:
            runner.close()
        self._views.clear()
        self._bound = []
        self.keeper.close()
        self.placement.close()
        self.module.to("meta")
        for memory in self._lent:
            memory.release()
        self._lent.clear()

    def _make_views(
        self, block: int, buffer: Tensor
    ) -> list[tuple[FrozenLinear, dict[str, Tensor]]]:
        parts: dict[str, dict[str, Tensor]] = {}
        packet = self.packets[block]
        for entry in packet.entries:
            if entry.offset < packet.streamed_bytes:
                parts.setdefault(entry.tensor, {})[entry.part] = view(entry, buffer)
        bound = []
        for name, named in parts.items():
            layer = self._owner(self._table[name].module)
            assert isinstance(layer, FrozenLinear)
            bound.append((layer, named))
        return bound

    def _owner(self, path: str) -> nn.Module:
        """The module at a path; once PEFT has wrapped a linear, the frozen one is its base layer."""
        owner = self.module.get_submodule(path)
        base: nn.Module = getattr(owner, "base_layer", owner)
        return base

    def _tensor(self, name: str) -> Tensor | None:
        """A small tensor of the module; None where upstream ties it to another, or does not keep it."""
        path, _, leaf = name.rpartition(".")
        found: Tensor | None = getattr(self._owner(path), leaf, None)
        return found

    def _type_of(self, name: str, value: Tensor) -> torch.dtype:
        """What a small tensor computes in."""
        is_as_stored = self._table[name].role == "buffer" or not value.is_floating_point()
        return value.dtype if is_as_stored else self._compute

    def _set(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self._owner(path)
        if leaf in owner._buffers:  # noqa: SLF001 - the only way to tell a buffer from a parameter
            setattr(owner, leaf, value)
        else:
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
