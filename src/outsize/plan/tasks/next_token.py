"""Text: rows of packed documents go through the base alone, and a loss that never holds all logits at once.

Documents of a row do not see each other, so mixing costs most when one document fills a row; that is what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from outsize.families.protocol import FAMILIES, RECURRENT_CHUNK, LanguageFamily, LayerKind
from outsize.plan.pools import Holding, Item, Phase, compute_pool
from outsize.plan.sizes import ModelSizes
from outsize.plan.tasks._faults import unused, wrong_data
from outsize.plan.tasks.protocol import Edits
from outsize.plan.work import Conditioner, Work
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section
from outsize.recipes.text import TextChoice
from outsize.recipes.yaml_tree import Fault

# A tile of logits with what it is made from, and what is carried from tile to tile for each token, as the objective says.
TILE_BYTES, TOKENS_AT_ONCE, CARRIED_BYTES = 256 << 20, 2048, 12
# Logits and the gradient of the hidden states: two products with the head, two operations each.
HEAD_OPERATIONS = 4
# Logits, their exponentials and the softcap's argument, fp32.
TILE_PAIR_BYTES = 12
# All hidden states, the rows of trained tokens, and a gradient of each.
HIDDEN_COPIES = 4
# int64 ids, labels and positions, int32 segments.
BATCH_BYTES_OF_TOKEN = 3 * 8 + 4
# Heads wider than flash kernels take attend in tiles of fp32 scores on a card: two and two in 16 bits at the gradient, of at
# least an eighth of the row's queries with all its keys. As families/_tiled_attention.py says.
WIDEST_FLASH_HEAD, SCORE_BYTES, SCORE_COPIES, QUERY_TILES = 256, 256 << 20, 3, 8
# For each number of a recurrent state and each chunk, where a block is differentiated: matrices from state to state and the
# states (10 bytes), and what belongs to the tokens of a chunk, which is half as large (10 bytes); no more than is done at once.
STATE_BYTES, PASS_BYTES = 20, 4 << 30
# A mask as it is made (one byte a pair) and as kernels take it (the compute type).
_MASK_BYTES = 1
_WINDOWS = (16384, 8192, 4096, 2048, 1024, 512)
_OF_PICTURES = (
    "train.timesteps",
    "train.loss",
    "train.guidance",
    "compare.steps",
    "compare.guidance",
    "compare.width",
    "compare.height",
    "previews.steps",
    "previews.guidance",
    "previews.width",
    "previews.height",
    "previews.decode",
)


@dataclass(frozen=True, slots=True)
class TextDemand:
    """Numbers of one recipe. width: D. new_tokens: written at most while sampling."""

    window: int
    batch: int
    width: int
    vocabulary: int
    kinds: tuple[LayerKind, ...]
    is_packed: bool
    new_tokens: int
    has_previews: bool

    @property
    def tokens(self) -> int:
        """Rows are padded to the window."""
        return self.batch * self.window

    @property
    def others(self) -> Sequence[TextDemand]:
        """Every row is padded to the window."""
        return ()

    @property
    def sample_tokens(self) -> int:
        """A prompt goes through at once; what is written after it, token by token."""
        return self.window

    @property
    def preview_tokens(self) -> int:
        """As when sampling."""
        return self.sample_tokens if self.has_previews else 0

    @property
    def preview_decode(self) -> None:
        """Text is what comes out."""

    def mixing_flops(self, _work: Work) -> Sequence[float]:
        """Of attention or of linear attention, for each block."""
        return [self.batch * kind.flops(self.window) for kind in self.kinds]

    def head_flops(self, _work: Work) -> float:
        """The head's matrix is as large as several blocks' are."""
        return HEAD_OPERATIONS * self.tokens * self.width * self.vocabulary

    def training(self, work: Work, holding: Holding) -> Iterator[Item]:
        """The batch, masks, hidden states with their gradient, and a tile of logits."""
        device = compute_pool(work)
        yield self._batch(work)
        hidden = HIDDEN_COPIES * self.tokens * self.width * work.compute_bytes
        yield Item("hidden states", device, hidden, "before the head, of trained tokens, gradients")
        # a head that is brought is brought once, for all tokens
        at_once = self.tokens if holding.has_vocabulary_on_host else TOKENS_AT_ONCE
        carried = min(self.tokens, at_once) * self.width * CARRIED_BYTES
        pairs = self.tokens * self.vocabulary * (TILE_PAIR_BYTES + work.compute_bytes)
        why = f"a tile of {self.vocabulary} a token, and what is carried on"
        yield Item("logits", device, min(TILE_BYTES, pairs) + carried, why)
        yield from self._masks(work)
        yield from self._states(work)

    def sampling(self, work: Work) -> Iterator[Item]:
        """Keys, values and states of all that was read and written."""
        length = self.window + self.new_tokens
        elements = sum(kind.cache_elements(length) for kind in self.kinds)
        why = f"keys, values and states of {length} tokens"
        yield Item("keys and values", compute_pool(work), elements * work.compute_bytes, why)

    def previewing(self, work: Work) -> Iterator[Item]:
        """The same, beside the batch that waits."""
        yield self._batch(work)
        yield from self.sampling(work)

    def decoding(self, _work: Work) -> Iterator[Item]:
        """Nothing."""
        yield from ()

    def before(self, _work: Work, _hold: Callable[[ModelSizes], Holding]) -> Iterator[Phase]:
        """Nothing is encoded."""
        yield from ()

    def after(self, _work: Work) -> Iterator[Phase]:
        """Text is what comes out."""
        yield from ()

    def disk(self, _work: Work) -> Iterator[Item]:
        """Tokens are nothing beside weights."""
        yield from ()

    def notes(self, _work: Work) -> Iterator[str]:
        """Nothing."""
        yield from ()

    def _batch(self, work: Work) -> Item:
        num_bytes = self.tokens * BATCH_BYTES_OF_TOKEN
        return Item("batch", compute_pool(work), num_bytes, "ids, labels, positions and segments")

    def _masks(self, work: Work) -> Iterator[Item]:
        """On a processor one for each reach, where documents share rows or a window is shorter; on a card tiles of wide heads."""
        if work.has_gpu:
            yield from self._scores(work)
            return
        reaches = {kind.window for kind in self.kinds if not kind.is_recurrent}
        is_short = [reach is not None and reach < self.window for reach in reaches]
        count = len(reaches) if self.is_packed else sum(is_short)
        if count:
            rows = self.batch if self.is_packed else 1
            pairs = rows * self.window**2
            num_bytes = count * pairs * _MASK_BYTES + pairs * work.compute_bytes
            yield Item(
                "attention masks", compute_pool(work), num_bytes, f"{count}, a row at a time"
            )

    def _scores(self, work: Work) -> Iterator[Item]:
        wide = [kind for kind in self.kinds if kind.head_dim > WIDEST_FLASH_HEAD]
        if not wide:
            return
        heads = max(kind.width // kind.head_dim for kind in wide)
        pairs = self.batch * heads * self.window * max(128, self.window // QUERY_TILES)
        num_bytes = SCORE_COPIES * min(SCORE_BYTES, 4 * pairs)
        why = f"tiles of scores, heads of {max(kind.head_dim for kind in wide)}"
        yield Item("attention scores", compute_pool(work), num_bytes, why)

    def _states(self, work: Work) -> Iterator[Item]:
        """What linear attention keeps at every chunk of one block, which is differentiated."""
        state = max((kind.state for kind in self.kinds), default=0)
        if state:
            chunks = -(-self.tokens // RECURRENT_CHUNK)
            why = f"of one block, at {chunks} chunks, with their gradient"
            num_bytes = min(PASS_BYTES, STATE_BYTES * state * chunks)
            yield Item("recurrent states", compute_pool(work), num_bytes, why)


@dataclass(frozen=True, slots=True)
class TextPlan:
    """See protocol.py."""

    @property
    def section(self) -> type[Section]:
        """Files of texts."""
        return TextChoice

    @property
    def size(self) -> str:
        """Tokens of a row."""
        return "data.window"

    @property
    def synthetic(self) -> dict[str, Any]:
        """Data that nobody reads."""
        return {"sets": [{"path": "synthetic"}]}

    @property
    def example(self) -> dict[str, str]:
        """One file."""
        return {"data.sets.path": "conversations.jsonl"}

    def faults(self, recipe: Recipe) -> Iterator[Fault]:
        """Data of another kind, and settings of pictures."""
        yield from wrong_data(recipe, self.section, "text")
        yield from unused(recipe, _OF_PICTURES, "text")

    def demand(
        self,
        recipe: Recipe,
        _conditioners: tuple[Conditioner, ...],
        _num_samples: tuple[int, ...] | None,
    ) -> TextDemand:
        """Rows of the recipe's window."""
        base, data = recipe.base, recipe.texts
        family = cast("LanguageFamily", FAMILIES.load(base.family))
        table = family.table(base.variant)
        vocabulary = family.vocabulary(base.variant)
        width = next(spec.shape[1] for spec in table if spec.shape[:1] == (vocabulary,))
        return TextDemand(
            window=data.window,
            batch=recipe.train.batch,
            width=width,
            vocabulary=vocabulary,
            kinds=family.layer_kinds(base.variant),
            is_packed=data.pack,
            new_tokens=recipe.compare.max_tokens,
            has_previews=recipe.previews.every is not None,
        )

    def shape(self, recipe: Recipe) -> str:
        """The window."""
        return f"{recipe.texts.window} tokens"

    def intake(self, recipe: Recipe) -> tuple[str, int]:
        """Tokens."""
        train = recipe.train
        return "tokens", train.batch * train.accumulate * recipe.texts.window

    def levers(self, recipe: Recipe) -> Iterator[list[Edits]]:
        """A shorter window."""
        now = recipe.texts.window
        yield [(("data.window", window),) for window in _WINDOWS if window < now]


plugin = TextPlan()
