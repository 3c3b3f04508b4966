"""Conversations worded by a tokenizer's chat template, and which characters of them the assistant wrote.

The whole conversation is rendered once and that text is what is tokenised. Where the assistant's turns lie in it is
found out from the template's own behaviour, since templates differ in everything: some strip the thinking of earlier
turns, move the system message, or word the last turn unlike the others, so that the text of a longer conversation does
not begin with that of a shorter one.

What a turn's span is: it begins where the model would begin to write, behind what the template gives as the prompt for
an answer; it ends with the end of the turn that the template sets, which the model must write as well (Gemma's
`<turn|>` is not its end of text). Thinking and tool calls lie inside.

How it is found:
1. A *skeleton* is the conversation with a word that stands nowhere else in place of each message's content. Rendering it,
   and beginnings of it with and without the prompt for an answer, shows what the template writes around each turn: its
   opening and its closing. One skeleton serves all conversations of the same roles.
2. The conversation is rendered with such words in place of the assistant's turns only, where opening and closing are easy
   to find. Putting the turns back must give the text itself. Where it does not, because the template changes what a turn
   says, one turn at a time is replaced: whatever such a change does not reach, before and behind, is not the turn.
A template for which neither holds is refused, never guessed at. One with `{% generation %}` marks is taken at its word.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outsize.base.catalogue import nearest
from outsize.base.errors import SourceError
from outsize.data._skeletons import Outline, Skeletons, mark_of, with_mark
from outsize.data.conversations import ASSISTANT, Chat
from outsize.recipes.text import TrainOn

CODE_VERSION = 1  # raise it when the same conversation must lead to another text or other spans

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_FORMAT = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1")
_USUAL_ROLES = frozenset({"system", "user", ASSISTANT, "tool"})


@dataclass(frozen=True, slots=True)
class Worded:
    """A text to tokenise. spans: characters that are trained, in order and apart.

    num_turns: the assistant's turns. num_dropped: of these, how many the template left out. num_open: how many it set
    no end to. appends_end: whether the tokenizer's end of text follows.
    """

    text: str
    spans: tuple[Span, ...]
    num_turns: int = 0
    num_dropped: int = 0
    num_open: int = 0
    appends_end: bool = False


class ChatTemplate:
    """The chat template of a tokenizer, with all that it may depend on fixed."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        options: Mapping[str, Any] | None = None,
        today: str = "2026-01-01",
    ) -> None:
        """Take the template of a tokenizer of transformers.

        options: variables for the template. today: the date it is told, ISO 8601.
        Raises: SourceError when the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise SourceError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, so conversations cannot be worded as its "
                "model knows them; take the tokenizer of the instruction-tuned model, put its chat_template.jinja "
                "beside it, or train on pairs with `as_chat: false`"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._today = dt.date.fromisoformat(today)
        added = list(tokenizer.added_tokens_decoder.values())
        special = [str(one) for one in added if one.special]
        self._skeletons = Skeletons(self._render, special, [str(one) for one in added])
        self._special = tuple(special)

    def describe(self) -> dict[str, Any]:
        """All that shapes what is worded, but the tokenizer's files, as JSON values for cache keys."""
        source = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        asks_date = "strftime_now" in source
        return {
            "code_version": CODE_VERSION,
            "template": source,
            "options": self._options,
            "today": self._today.isoformat() if asks_date else None,
        }

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text after which the model is to answer these messages.

        Raises: SourceError with the template's own words.
        """
        return self._render(messages, prompts=True)[0]

    def word(self, chat: Chat, train_on: TrainOn = "assistant") -> Worded:
        """The text of a conversation and the spans to train.

        Raises: SourceError when the template refuses the conversation or does not render a role of it, or when it cannot
        be told which characters are the assistant's.
        """
        source = self._source(chat)
        self._check_roles(chat, source)
        turns = [i for i, one in enumerate(chat.messages) if one["role"] == ASSISTANT]
        if _GENERATION.search(source):
            return self._marked(chat, turns, train_on)
        text, _ = self._render(chat.messages, chat.tools)
        outline = self._skeletons.of(chat)
        if train_on == "everything":
            return Worded(text, ((0, len(text)),), len(turns), 0, _num_open(outline, turns))
        wanted = turns[-1:] if train_on == "last_turn" else turns
        wanted = [i for i in wanted if i not in chat.untrained]
        rendered = [i for i in wanted if i in outline]
        found = self._spans_at_once(chat, text, outline, rendered)
        if found is None:
            found = self._spans_one_by_one(chat, text, outline, rendered)
        spans = tuple(sorted(found.values()))
        if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
            raise _cannot_tell("turns of the assistant overlap in it")
        return Worded(
            text, spans, len(turns), len(wanted) - len(spans), _num_open(outline, list(found))
        )

    def _spans_at_once(
        self, chat: Chat, text: str, outline: Outline, turns: Sequence[int]
    ) -> dict[int, Span] | None:
        """Spans when the template renders what turns say as it is or trimmed; None when it does not."""
        stem = _stem(text)
        messages = list(chat.messages)
        for i in turns:
            messages[i] = with_mark(messages[i], mark_of(i, stem), outline[i].carrier)
        other, _ = self._render(messages, chat.tools)
        places = {i: outline[i].locate(other, mark_of(i, stem)) for i in turns}
        inside = {i: place for i, place in places.items() if place is not None}
        if len(inside) < len(places):
            return None
        order = sorted(inside, key=lambda i: inside[i])
        for trims in (False, True):
            made, position, spans = "", 0, {}
            for i in order:
                begin, end = inside[i]
                said = outline[i].said(chat.messages[i])
                made += other[position:begin]
                first = len(made)
                made += other[begin:end].replace(mark_of(i, stem), said.strip() if trims else said)
                spans[i] = (first, len(made))
                position = end
            if made + other[position:] == text:
                return spans
        return None

    def _spans_one_by_one(
        self, chat: Chat, text: str, outline: Outline, turns: Sequence[int]
    ) -> dict[int, Span]:
        """Spans when the template changes what turns say; a turn it leaves out altogether has none."""
        stem = _stem(text)
        spans = {}
        for i in turns:
            messages = list(chat.messages)
            messages[i] = with_mark(messages[i], mark_of(i, stem), outline[i].carrier)
            other, _ = self._render(messages, chat.tools)
            place = outline[i].locate(other, mark_of(i, stem))
            if place is None:
                continue
            begin, behind = place[0], len(other) - place[1]
            end = len(text) - behind
            if end < begin or text[:begin] != other[:begin] or text[end:] != other[place[1] :]:
                raise _cannot_tell(f"text outside message {i + 1} changes with what it says")
            spans[i] = (begin, end)
        return spans

    def _marked(self, chat: Chat, turns: Sequence[int], train_on: TrainOn) -> Worded:
        """As the template's own marks say."""
        text, marks = self._render(chat.messages, chat.tools, marks=True)
        spans = tuple((begin, end) for begin, end in marks if end > begin)
        num_open = sum(not text[:end].rstrip().endswith(self._special) for _, end in spans)
        if train_on == "everything":
            return Worded(text, ((0, len(text)),), len(turns), 0, num_open)
        if train_on == "last_turn" or chat.untrained:
            if len(spans) != len(turns):
                raise _cannot_tell(
                    f"its {{% generation %}} marks give {len(spans)} spans for {len(turns)} assistant turns"
                )
            last = turns[-1:] if train_on == "last_turn" else turns
            wanted = [i in last and i not in chat.untrained for i in turns]
            spans = tuple(span for span, is_wanted in zip(spans, wanted, strict=True) if is_wanted)
        return Worded(text, spans, len(turns), max(0, len(turns) - len(marks)), num_open)

    def _source(self, chat: Chat) -> str:
        """The template's own text, of several the one for these tools."""
        return str(self._tokenizer.get_chat_template(tools=list(chat.tools) or None))

    def _check_roles(self, chat: Chat, source: str) -> None:
        """Refuse a role that is neither usual nor named by the template. Raises: SourceError."""
        named = set(re.findall(r"[\"'](\w+)[\"']", source)) | _USUAL_ROLES
        for index, message in enumerate(chat.messages):
            role = message["role"]
            if role not in named:
                raise SourceError(
                    f"the chat template does not know the role {role!r} of message {index + 1}; "
                    f"{nearest(role, _USUAL_ROLES)}"
                )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompts: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Text, and the spans of `{% generation %}` marks. prompts: whether it ends with the prompt for an answer.

        Raises: SourceError with the template's own words.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        source = str(self._tokenizer.get_chat_template(tools=list(tools) or None))
        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(one) for one in messages]],
                tools=[dict(one) for one in tools] or None,
                chat_template=_with_date(source, self._today),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompts,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise SourceError(f"the chat template refuses the conversation: {error}") from error
        return texts[0], [(begin, end) for begin, end in spans[0]] if marks else []


def _num_open(outline: Outline, turns: Sequence[int]) -> int:
    return sum(i in outline and not outline[i].closing for i in turns)


def _stem(text: str) -> str:
    """A beginning of marks that is not in the text."""
    stem = "Qz"
    while stem in text:
        stem += "q"
    return stem


def _with_date(source: str, today: dt.date) -> str:
    """A template that is told this date instead of the clock's, so that its texts are the same tomorrow."""
    if "strftime_now" not in source:
        return source
    formats = {one: today.strftime(one) for _, one in _DATE_FORMAT.findall(source)}
    macro = (
        f"{{% macro strftime_now(format) %}}{{% set dates = {json.dumps(formats)} %}}"
        "{{ dates[format] if format in dates else raise_exception('asks for a date in an unknown format') }}"
        "{% endmacro %}\n"
    )
    return macro + source


def _cannot_tell(why: str) -> SourceError:
    return SourceError(
        f"it cannot be told which part of the chat template's text is the assistant's: {why}; put "
        "{% generation %} and {% endgeneration %} around it in a copy of the template"
    )
