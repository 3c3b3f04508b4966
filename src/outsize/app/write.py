"""Text from a language base, with its adapter or without: token by token, through whatever placement holds the blocks.

A streamed base crosses the bus once for each token. Prompts are worded as the training texts were: by the chat template
where these are conversations, else as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from outsize.app.attached import adapted, put_on_, require_adapter
from outsize.app.parts import BASE
from outsize.app.people import people_rendered
from outsize.app.text_corpus import (
    Tokens,
    documents_of,
    missing_texts,
    open_tokens,
    packed,
)
from outsize.base.errors import RecipeError
from outsize.data.templates import ChatTemplate
from outsize.data.tokens import Tokenising
from outsize.sample.text import draw_token, generator_of

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.data.documents import Documents
    from outsize.families.protocol import LanguageFamily
    from outsize.layers.model import FrozenModel
    from outsize.runs.folder import RunFolder

_LOOKED_AT = 8  # samples of a file whose turns tell how a turn ends


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be gone on from. shown: for people; ids: its tokens."""

    shown: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """One text. has_ended: the model ended it, rather than the limit."""

    prompt: Prompt
    seed: int
    text: str
    ids: tuple[int, ...]
    has_ended: bool


class Scribe:
    """Prompts of one recipe, and when a text is over; both as its texts have it.

    Where the texts are no longer there, a tokenizer with a chat template is taken to answer, and that is said.
    """

    def __init__(self, site: Site) -> None:
        recipe = site.recipe
        self._recipe = recipe
        self._tokens: Tokens = open_tokens(site.parts[BASE], offline=site.offline)
        self._documents: Documents | None = None
        tokenizer, missing = self._tokens.tokenizer, missing_texts(recipe)
        if missing:
            self._is_chat = bool(tokenizer.chat_template)
            site.progress.say(
                f"{missing[0]} is not there: prompts are "
                + ("worded by the chat template" if self._is_chat else "taken as they stand")
            )
        else:
            self._documents = documents_of(recipe, self._tokens, site.cache)
            self._is_chat = any(kind.is_chat for kind in self._documents.kinds)
        self._tokenising = Tokenising(tokenizer, None)
        self._template = None
        if self._is_chat:
            data = recipe.texts
            self._template = ChatTemplate(
                tokenizer, options=data.template_options, today=data.today
            )
        self.ends = frozenset(self._ends())

    def worded(self, text: str) -> Prompt:
        """A prompt as the model was trained to see one: a user's turn, or the beginning of a text.

        Raises: RecipeError when it is empty.
        """
        if not text.strip():
            raise RecipeError("a prompt is empty; write what is to be answered or gone on from")
        tokenizer = self._tokens.tokenizer
        if self._template is None:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            asked = self._template.prompt([{"role": "user", "content": text}])
            ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        bos = self._tokenising.bos
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return Prompt(text, tuple(ids))

    def beginnings(self, count: int) -> list[Prompt]:
        """Prompts from texts that are held out.

        Raises: RecipeError when there are none.
        """
        found = (
            []
            if self._documents is None
            else packed(self._recipe, self._tokens, self._documents).beginnings(count)
        )
        if not found:
            raise RecipeError(
                "nothing is held out to begin from; name compare.prompts in the recipe"
            )
        return [Prompt(self.decoded(ids, with_marks=self._is_chat), tuple(ids)) for ids in found]

    def decoded(self, ids: Sequence[int], *, with_marks: bool = False) -> str:
        """Text of tokens."""
        text: str = self._tokens.tokenizer.decode(list(ids), skip_special_tokens=not with_marks)
        return text

    def _ends(self) -> Iterator[int]:
        """The end of a text, and whatever else training texts end their turns with."""
        if self._tokenising.eos is not None:
            yield self._tokenising.eos
        added: Any = self._tokens.tokenizer.added_tokens_decoder
        for file in () if self._documents is None else self._documents.files:
            for index in range(min(len(file.rows), _LOOKED_AT)):
                tokens, trained = file.document(index)
                closing = trained.copy()
                closing[:-1] &= ~trained[1:]  # the last token of each trained span
                yield from (int(one) for one in tokens[closing] if int(one) in added)


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """How texts are written; see the recipe's compare section."""

    max_tokens: int
    temperature: float
    top_p: float


def settings_of(site: Site) -> WriteSettings:
    """What the recipe says."""
    choice = site.recipe.compare
    return WriteSettings(choice.max_tokens, choice.temperature, choice.top_p)


def write_with(
    site: Site,
    run: RunFolder,
    scribe: Scribe,
    asks: Sequence[tuple[Prompt, int]],
    *,
    adapters: Sequence[bool],
) -> Iterator[tuple[bool, list[Written]]]:
    """All texts by each of the models that are asked for: False is the base alone, True has the run's adapter.

    asks: prompts, each with a seed.
    Raises: RecipeError, before any model is opened, when the run has no adapter of this recipe; ConsentMissing when somebody
    whom the adapter shows has not agreed, or has not any more when it is done.
    """
    if True in adapters:
        require_adapter(site, run)
    people = people_rendered(site, run, with_adapter=True in adapters)
    people.begin("render")
    with adapted(site) as (model, adapter, _):
        if True in adapters:
            put_on_(site, run, adapter)
        for has_adapter in adapters:
            name = "sample adapter" if has_adapter else "sample base"
            with nullcontext() if has_adapter else adapter.disabled(), site.stages.stage(name):
                written = []
                for done, (prompt, seed) in enumerate(asks, start=1):
                    written.append(write_one(site, model, scribe, prompt, seed))
                    site.progress.advance(name, done, len(asks), "texts")
            people.release("render")
            yield has_adapter, written


@torch.no_grad()
def write_one(site: Site, model: FrozenModel, scribe: Scribe, prompt: Prompt, seed: int) -> Written:
    """One text, up to an end that the model writes or to the limit."""
    part, settings = site.parts[BASE], settings_of(site)
    family = cast("LanguageFamily", part.family)
    cache = family.new_cache(part.variant, model.module)
    generator = generator_of(seed)
    ids: list[int] = []
    unread, has_ended = list(prompt.ids), False
    while len(ids) < settings.max_tokens and not has_ended:
        model.begin("forward")
        inputs_BT = torch.tensor([unread], device=site.device.torch_device)
        logits_BV = family.next_logits(part.variant, model.module, inputs_BT, cache)
        token = draw_token(
            logits_BV[0],
            temperature=settings.temperature,
            top_p=settings.top_p,
            generator=generator,
        )
        has_ended = token in scribe.ends
        if not has_ended:
            ids.append(token)
        unread = [token]
    return Written(prompt, seed, scribe.decoded(ids), tuple(ids), has_ended)
