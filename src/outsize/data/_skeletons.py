"""What a chat template writes around the assistant's turns, found with words that stand nowhere else.

See templates.py for the idea. An outline depends on roles, tools and whatever messages hold beside their content, and
not on what they say; it is found once for all conversations that are alike in these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from outsize.base.errors import SourceError
from outsize.data.conversations import ASSISTANT, Chat

_MARK = re.compile(r"Qz\d+zQ")
_MOST_HELD = 4096  # outlines; a data set with more kinds of conversation finds some of them again
_REASONING = ("reasoning_content", "reasoning", "thinking")

Carrier = Literal["content", "call"]


class Render(Protocol):
    """Renders messages: (text, spans); see ChatTemplate."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompts: bool = False,
    ) -> tuple[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around one turn: the text before its span, and that at its span's end.

    carrier: which part of the message the template shows, its content or the name of its first tool call.
    """

    opening: str
    closing: str
    carrier: Carrier

    def said(self, message: Mapping[str, Any]) -> str:
        """What the carrier holds."""
        return str(message["content"] if self.carrier == "content" else _function(message)["name"])

    def locate(self, text: str, mark: str) -> tuple[int, int] | None:
        """The span of the turn that holds a mark; None when the mark is not there.

        Raises: SourceError when the text around it is not as in the skeleton.
        """
        at = text.find(mark)
        if at < 0:
            return None
        begin = text.rfind(self.opening, 0, at)
        end = at + len(mark)
        if text.find(mark, end) >= 0:
            raise SourceError(
                "the chat template shows an assistant turn twice, so it cannot be told which one to train"
            )
        if begin < 0 or not text.startswith(self.closing, end):
            raise SourceError(
                "the chat template words a turn unlike the same turn of another conversation "
                f"(it should stand between {self.opening!r} and {self.closing!r}), so it cannot be told which "
                "part of the text is the assistant's"
            )
        return begin + len(self.opening), end + len(self.closing)


Outline = Mapping[
    int, Around
]  # by index of the message; a turn that the template leaves out has none


def mark_of(index: int, stem: str = "Qz") -> str:
    """The word in place of message `index`."""
    return f"{stem}{index}zQ"


def with_mark(message: Mapping[str, Any], mark: str, carrier: Carrier) -> dict[str, Any]:
    """The message saying the mark."""
    if carrier == "content":
        return {**message, "content": mark}
    first, *others = message["tool_calls"]
    named = {**_function(message), "name": mark}
    call = {**first, "function": named} if "function" in first else named
    return {**message, "tool_calls": [call, *others]}


class Skeletons:
    """Outlines of conversations under one template."""

    def __init__(self, render: Render, special: Sequence[str], added: Sequence[str]) -> None:
        """special: texts of the tokenizer's special tokens, among which turns' ends are looked for.

        added: all tokens that it never merges with others.
        """
        self._render = render
        self._special = _any_of(special)
        self._added = _any_of(added)
        self._held: dict[str, Outline] = {}

    def of(self, chat: Chat) -> Outline:
        """The outline of a conversation.

        Raises: SourceError when a role of it is not rendered.
        """
        bare = [_bare(message, index) for index, message in enumerate(chat.messages)]
        key = json.dumps([bare, chat.tools], sort_keys=True, default=str)
        if key not in self._held:
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            self._held[key] = self._find(bare, chat.tools)
        return self._held[key]

    def _find(self, bare: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Outline:
        text, _ = self._render(bare, tools)
        _check_shown(bare, text)
        outline = {}
        for index, message in enumerate(bare):
            if message["role"] != ASSISTANT:
                continue
            carrier: Carrier = "content"
            shown, messages = text, bare
            if mark_of(index) not in text:
                if not message.get("tool_calls"):
                    continue
                carrier = "call"
                named = with_mark({**message, "content": ""}, mark_of(index), carrier)
                messages = [*bare[:index], named, *bare[index + 1 :]]
                shown, _ = self._render(messages, tools)
                if mark_of(index) not in shown:
                    continue
            before, after = _sides(shown, index)
            prompt = self._prompt(bare, index, tools, before)
            opening = self._without_half_a_token(before, _common_beginning(before, prompt))
            closing = self._closing(messages, index, tools, after)
            outline[index] = Around(opening, closing, carrier)
        return outline

    def _without_half_a_token(self, text: str, beginning: str) -> str:
        """The beginning without an added token that it cuts, as of `<think>` and `</think>`."""
        for match in self._added.finditer(text):
            if match.start() < len(beginning) < match.end():
                return text[: match.start()]
        return beginning

    def _prompt(
        self,
        bare: Sequence[dict[str, Any]],
        index: int,
        tools: Sequence[Mapping[str, Any]],
        before: str,
    ) -> str:
        """What stands between the message before and an answer that has yet to be written."""
        earlier = bare[:index]
        without = self._try(earlier, tools)
        prompted = self._try(earlier, tools, prompts=True)
        if prompted is not None and prompted != without:
            return prompted[_last_end(prompted) :]
        # The template has no prompt of its own: then it is what stands before an answer in plain words.
        plain = {"role": ASSISTANT, "content": mark_of(index)}
        answered = self._try([*earlier, plain], tools)
        if answered is None or mark_of(index) not in answered:
            return before
        return _sides(answered, index)[0]

    def _closing(
        self,
        messages: Sequence[dict[str, Any]],
        index: int,
        tools: Sequence[Mapping[str, Any]],
        after: str,
    ) -> str:
        """What of the text behind a turn still belongs to it, up to the token that ends it; "" where none does.

        What the template writes behind a turn both at a conversation's end and before another question is the turn's own,
        up to the last special token in it. Some templates end the last turn with another token than the others, or end only
        what another turn follows; then the first special token is taken. Where there is none, the end may be in words
        (`<|im_end|>` of a tokenizer that does not know it); where there are none of these, the template ends no turn.
        """
        asks = {"role": "user", "content": mark_of(len(messages))}
        own = self._behind(messages[: index + 1], index, tools, after)
        followed = self._behind([*messages[: index + 1], asks], index, tools, own)
        ends = [m.end() for m in self._special.finditer(_common_beginning(own, followed))]
        if ends and after.startswith(own[: ends[-1]]):
            return own[: ends[-1]]
        first = self._special.search(after)
        if first is not None and (self._special.search(own) or not after[: first.start()].strip()):
            return after[: first.end()]
        words = own.rstrip()
        return words if words and after.startswith(words) else ""

    def _behind(
        self,
        messages: Sequence[dict[str, Any]],
        index: int,
        tools: Sequence[Mapping[str, Any]],
        otherwise: str,
    ) -> str:
        """What stands behind a turn in another conversation, if the template takes it."""
        text = self._try(messages, tools)
        return otherwise if text is None or mark_of(index) not in text else _sides(text, index)[1]

    def _try(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompts: bool = False,
    ) -> str | None:
        """A rendering of a beginning, which the template may refuse though it takes the whole."""
        if not messages:
            return None
        try:
            return self._render(messages, tools, prompts=prompts)[0]
        except SourceError:
            return None


def _bare(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message without what it says."""
    thoughts = {key: "Qt" for key in _REASONING if message.get(key)}
    return {**message, **thoughts, "content": mark_of(index)}


def _check_shown(bare: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises: SourceError when no message of a role is in the text."""
    shown = {one["role"] for index, one in enumerate(bare) if mark_of(index) in text}
    for index, message in enumerate(bare):
        if message["role"] not in shown and not message.get("tool_calls"):
            raise SourceError(
                f"the chat template does not know the role {message['role']!r}, or not there: what message {index + 1} "
                "says is not in the text it gives; leave such messages out"
            )


def _sides(text: str, index: int) -> tuple[str, str]:
    """Text before and behind a message's mark, up to the marks of its neighbours."""
    at = text.index(mark_of(index))
    end = at + len(mark_of(index))
    following = _MARK.search(text, end)
    return text[_last_end(text[:at]) : at], text[end : following.start() if following else None]


def _last_end(text: str) -> int:
    """Where the last mark ends; 0 without one."""
    return max((match.end() for match in _MARK.finditer(text)), default=0)


def _function(message: Mapping[str, Any]) -> Mapping[str, Any]:
    first: Mapping[str, Any] = message["tool_calls"][0]
    inner: Mapping[str, Any] = first.get("function", first)
    return inner


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Finds any of the words, the longest first; of none, nothing."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _common_beginning(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]
