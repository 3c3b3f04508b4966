"""What the language families share: a decoder of transformers, its head, and rows of packed documents.

The model is upstream's class for text alone. Its layers are called one by one with a mask that says which documents there
are, so that a block's arguments are tensors and nothing else; generating goes through upstream's own forward, which knows
its caches. A tied head is no module and no row of the table: the token table is used twice.

Dimensions: B batch rows, T tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from outsize.base.layout import Layout, Rule
from outsize.base.table import ShapeTable, TensorSpec
from outsize.families._build import Stacked, build_on_meta, row_of
from outsize.families._packed import reach, several_documents
from outsize.families._specs import Specs, embedding, linear, norm, within
from outsize.families.protocol import Component, Head, LayerKind, Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FULL = "full_attention"
# Where files keep the decoder and an untied head: a text class; a class with towers, as transformers 5 writes it; the
# same as transformers 4 wrote it; the decoder alone.
_PLACES = {
    "causal": ("model.", "lm_head."),
    "conditional": ("model.language_model.", "lm_head."),
    "nested": ("language_model.model.", "language_model.lm_head."),
    "decoder": ("", "lm_head."),
}


class Row(Stacked, Protocol):
    """One size of a decoder, in what all families ask of it."""

    @property
    def width(self) -> int:
        """D."""

    @property
    def vocabulary(self) -> int:
        """V."""

    @property
    def is_tied(self) -> bool:
        """Whether the head is the token table."""

    @property
    def softcap(self) -> float | None:
        """Of the logits."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """How each layer mixes tokens."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLanguage(Generic[R]):
    """A language family over a decoder of transformers.

    layer: the tensors of one layer of a kind. values: what upstream's config.json says of a row. upstream, model_type: the
    class for text alone, and its word in config.json. make: that class from the values. rotate: (decoder, hidden states,
    positions (B, T)) -> rotary tables by kind of layer. fill_: puts values into buffers that no checkpoint holds, given
    the decoder and the device. left_out: see the protocol.
    """

    name: str
    rows: Mapping[str, R]
    layer: Callable[[R, LayerKind], Specs]
    values: Callable[[R], dict[str, Any]]
    upstream: str
    model_type: str
    make: Callable[[dict[str, Any]], nn.Module]
    rotate: Callable[[Any, Tensor, Tensor], Mapping[str, Any]]
    fill_: Callable[[Any, torch.device], None]
    left_out: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(self.rows)

    @property
    def objective(self) -> str:
        """The next token."""
        return "next_token"

    @property
    def folder(self) -> str:
        """The repository itself."""
        return ""

    @property
    def tokenizer_folder(self) -> str:
        """Beside the weights."""
        return ""

    def components(self, variant: str) -> tuple[Component, ...]:
        """None: text needs no encoder."""
        self._row(variant)
        return ()

    def table(self, variant: str) -> ShapeTable:
        """Token table, layers, last norm, and the head where it is not the token table."""
        row = self._row(variant)
        of_kind = {kind: self.layer(row, kind) for kind in set(row.kinds)}
        head = () if row.is_tied else linear("lm_head", row.vocabulary, row.width, "head")
        return ShapeTable(
            (
                *embedding("model.embed_tokens", row.vocabulary, row.width),
                *(
                    spec
                    for i, kind in enumerate(row.kinds)
                    for spec in within(f"model.layers.{i}", of_kind[kind], block=i)
                ),
                *norm("model.norm", row.width),
                *head,
            )
        )

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """The names of transformers at every place where its classes, old and new, keep a decoder."""
        table = self.table(variant)
        return tuple(
            Layout(name, rules=_moved(table, decoder, head))
            for name, (decoder, head) in _PLACES.items()
        )

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """The layers."""
        return tuple(f"model.layers.{i}" for i in range(len(self._row(variant).kinds)))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says of the text part."""
        return self.values(self._row(variant))

    def published(self, variant: str) -> Published:
        """The class for text alone; nothing lies beside the table."""
        config = {"model_type": self.model_type, "dtype": "bfloat16", **self.config(variant)}
        return Published("transformers", self.upstream, config)

    def build(self, variant: str) -> nn.Module:
        """Upstream's class for text; a tied head is an identity, since the token table stands for it."""
        from torch import nn

        row = self._row(variant)
        model = build_on_meta(lambda: self.make(self.config(variant)))
        if row.is_tied:
            model.lm_head = nn.Identity()
        _number_(model.get_submodule("model"), [0] * len(row.kinds))
        return model

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Rotary frequencies, computed on the CPU as upstream does, whatever the device."""
        self.fill_(model.get_submodule("model"), device)

    def vocabulary(self, variant: str) -> int:
        """V."""
        return self._row(variant).vocabulary

    def layer_kinds(self, variant: str) -> tuple[LayerKind, ...]:
        """Of each block."""
        return self._row(variant).kinds

    def hidden(
        self,
        variant: str,
        model: nn.Module,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        segments_BT: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states, normed: (B, T, D); see the protocol."""
        kinds = self._row(variant).kinds
        decoder: Any = model.get_submodule("model")
        hidden_BTD = _embedded(decoder, input_ids_BT)
        device = hidden_BTD.device
        segments = several_documents(segments_BT)
        rotary = self.rotate(decoder, hidden_BTD, position_ids_BT.to(device))
        told = {
            kind: _told(layer, kind, segments, hidden_BTD)
            for kind, layer in dict(zip(kinds, decoder.layers, strict=True)).items()
        }
        for layer, kind in zip(decoder.layers, kinds, strict=True):
            hidden_BTD = layer(hidden_BTD, position_embeddings=rotary[kind.name], **told[kind])
        normed: Tensor = decoder.norm(hidden_BTD)
        return normed

    def head(self, variant: str, model: nn.Module) -> Head:
        """The token table, or the head's own matrix."""
        row = self._row(variant)
        path = "model.embed_tokens.weight" if row.is_tied else "lm_head.weight"
        return Head(model.get_parameter(path), row.softcap)

    def new_cache(self, variant: str, model: nn.Module) -> Any:
        """Upstream's, one part for each layer of the kind it needs."""
        from transformers import DynamicCache

        self._row(variant)
        decoder: Any = model.get_submodule("model")
        return DynamicCache(config=decoder.config)

    def next_logits(
        self, variant: str, model: nn.Module, input_ids_BT: Tensor, cache: Any
    ) -> Tensor:
        """Logits (B, V) of the token after these; see the protocol."""
        import torch

        decoder: Any = model.get_submodule("model")
        weight, softcap = self.head(variant, model)
        with torch.no_grad(), _numbered(decoder):
            inputs_BTD = _embedded(decoder, input_ids_BT)
            given = {_cache_word(decoder): cache}
            hidden_BTD = decoder(inputs_embeds=inputs_BTD, use_cache=True, **given)[0]
            last_BD = hidden_BTD[:, -1].to(weight.device)
            logits_BV = torch.nn.functional.linear(last_BD, weight).float()
            return logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)

    def _row(self, variant: str) -> R:
        return row_of(self.name, self.rows, variant)


def renew_rotary_(decoder: Any, device: torch.device) -> None:
    """Replace the rotary module by one whose frequencies were computed on the CPU."""
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)


def rotate_alike(decoder: Any, hidden_BTD: Tensor, position_ids_BT: Tensor) -> Mapping[str, Any]:
    """One rotary table for all layers, which are of one kind."""
    return {FULL: decoder.rotary_emb(hidden_BTD, position_ids_BT)}


def _moved(table: Iterable[TensorSpec], decoder: str, head: str) -> tuple[Rule, ...]:
    """One rule for each name, layers' numbers left open: ours with the decoder and the head where a file keeps them."""
    ours = dict.fromkeys(
        re.sub(r"^model\.layers\.\d+\.", "model.layers.{i}.", spec.name) for spec in table
    )
    return tuple(
        Rule(
            name,
            head + name.removeprefix("lm_head.")
            if name.startswith("lm_head.")
            else decoder + name.removeprefix("model."),
        )
        for name in ours
    )


def _told(
    layer: Any, kind: LayerKind, segments_BT: Tensor | None, hidden_BTD: Tensor
) -> dict[str, Tensor | None]:
    """What the layers of a kind are told of documents and windows."""
    device, num_tokens = hidden_BTD.device, hidden_BTD.shape[1]
    if kind.is_recurrent:
        given = None if segments_BT is None else segments_BT.to(device, non_blocking=True)
        return {"attention_mask": None, "segments": given}
    from outsize.families._attention import way_of

    way = way_of(device, hidden_BTD.dtype, layer.self_attn.head_dim)
    return {"attention_mask": reach(way, segments_BT, num_tokens, kind.window, device)}


def _embedded(decoder: Any, input_ids_BT: Tensor) -> Tensor:
    """Token vectors on the decoder's device, looked up where the token table lies, which may be the host.

    Ids that lie where the table does, or pinned on the host, are not waited for.
    """
    table = decoder.embed_tokens
    lies_at, device = table.weight.device, decoder.norm.weight.device
    ids_BT = input_ids_BT.to(lies_at, non_blocking=True)
    vectors: Tensor = (
        table(ids_BT) if lies_at == device else vectors_from_host(table, ids_BT, device)
    )
    return vectors


def vectors_from_host(table: Any, ids_BT: Tensor, device: torch.device) -> Tensor:
    """What upstream's module of a token table in host memory gives for these ids (B, T), on a device: (B, T, D).

    Only rows are looked up on the host. On the device they are a table of their own to that module, which may scale them.
    """
    import torch

    rows_ND = torch.empty(
        (ids_BT.numel(), table.weight.shape[1]),
        dtype=table.weight.dtype,
        pin_memory=device.type != "cpu",
    )
    with torch.no_grad():
        torch.index_select(table.weight, 0, ids_BT.flatten(), out=rows_ND)
    given = {name: one.to(device) for name, one in table.named_buffers()}
    given["weight"] = rows_ND.to(device, non_blocking=True)
    places_BT = torch.arange(len(rows_ND), device=device).view_as(ids_BT)
    found: Tensor = torch.func.functional_call(table, given, (places_BT,))
    return found


@contextmanager
def _numbered(decoder: Any) -> Iterator[None]:
    """Within the block every layer knows its number, by which it finds its part of a cache.

    Otherwise all have the same: without a cache it means nothing, and blocks that differ in it could share no graph.
    """
    count = len(decoder.layers)
    _number_(decoder, range(count))
    try:
        yield
    finally:
        _number_(decoder, [0] * count)


def _number_(decoder: Any, numbers: Iterable[int]) -> None:
    for layer, number in zip(decoder.layers, numbers, strict=True):
        for one in (layer, *layer.children()):
            if hasattr(one, "layer_idx"):
                one.layer_idx = number


def _cache_word(decoder: Any) -> str:
    """What upstream's forward calls its cache; transformers 5.18 renamed it."""
    parameters = inspect.signature(type(decoder).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
