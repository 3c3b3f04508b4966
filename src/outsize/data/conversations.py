"""From rows to samples: conversations, prompts with completions, and plain text, whatever their columns are called.

A conversation keeps what its messages hold beside role and content (tool calls, reasoning), because chat templates
read it. What a row means is decided once for a file, by the names of its columns or by the recipe; a row that does not
hold to it is a fault and never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outsize.base.errors import SourceError
from outsize.recipes.text import TextSet

ASSISTANT = "assistant"
_PAIR_COLUMNS = (("prompt", "completion"), ("prompt", "response"))
_INSTRUCTIONS = ("instruction", "output")
_TURN_COLUMNS = ("messages", "conversations")
# ShareGPT's words for who speaks; others (system, tool) are the same everywhere.
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for a chat template. untrained: indices of assistant messages that are context only."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plain:
    """A text that no template words. prompt: what comes before it and belongs to the same document."""

    text: str
    prompt: str = ""


Sample = Chat | Plain


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a set mean. names: the conversation's, the prompt's and then the completion's, or the text's."""

    kind: Literal["messages", "pairs", "text"]
    names: tuple[str, ...]
    as_chat: bool = True

    @property
    def is_chat(self) -> bool:
        """Whether samples go through the chat template."""
        return self.kind == "messages" or (self.kind == "pairs" and self.as_chat)


def columns_of(item: TextSet, row: Mapping[str, Any]) -> Columns:
    """What columns mean: as the recipe names them, else by the names in a row.

    Raises: SourceError naming the row's columns when they are not known.
    """
    if item.messages is not None:
        return Columns("messages", (item.messages,))
    if item.text is not None:
        return Columns("text", (item.text,))
    if item.prompt or item.completion is not None:
        default = next((one for one in ("completion", "response") if one in row), "completion")
        names = (*(item.prompt or ("prompt",)), item.completion or default)
        return Columns("pairs", names, item.as_chat)
    found = [one for one in _found(item, row) if item.kind in {"auto", one.kind}]
    if found:
        return found[0]
    known = ", ".join(sorted(row)) or "none"
    if all(name in row for name in _INSTRUCTIONS):
        raise SourceError(
            f"the columns are {known}; say which make the prompt: `prompt: [instruction, input]` and "
            "`completion: output`"
        )
    wanted = "" if item.kind == "auto" else f" for {item.kind}"
    raise SourceError(
        f"no known column{wanted} among {known}; name it in the recipe: messages, prompt and completion, or text"
    )


def sample_of(row: Mapping[str, Any], columns: Columns) -> Sample:
    """The sample that a row holds.

    Raises: SourceError saying what is wrong with the row; the caller adds where it is.
    """
    missing = [name for name in _required(columns) if row.get(name) is None]
    if missing:
        raise SourceError(
            f"has no column {' and no '.join(map(repr, missing))}, as the rows before; it has {', '.join(sorted(row))}"
        )
    if columns.kind == "messages":
        return _conversation(row[columns.names[0]], row.get("tools"))
    if columns.kind == "pairs":
        return _pair(row, columns)
    text = row[columns.names[0]]
    if not isinstance(text, str):
        raise SourceError(f"the column {columns.names[0]!r} must hold a text")
    if not text.strip():
        raise SourceError("the text is empty; leave the row out")
    return Plain(text)


def _found(item: TextSet, row: Mapping[str, Any]) -> list[Columns]:
    """All that the names allow; a conversation before pairs, which some sets hold as its first turn."""
    turns = [Columns("messages", (name,)) for name in _TURN_COLUMNS if name in row]
    pairs = [
        Columns("pairs", names, item.as_chat)
        for names in _PAIR_COLUMNS
        if all(name in row for name in names)
    ]
    return [*turns, *pairs, *([Columns("text", ("text",))] if "text" in row else [])]


def _required(columns: Columns) -> tuple[str, ...]:
    """Columns that every row must have: of a prompt of several, the first."""
    return (columns.names[0], columns.names[-1]) if columns.kind == "pairs" else columns.names


def _conversation(turns: object, tools: object) -> Chat:
    if not isinstance(turns, (list, tuple)) or not turns:
        raise SourceError("the conversation must be a list of messages, and not an empty one")
    messages, untrained = [], set()
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise SourceError(f"message {index + 1} must be an object with role and content")
        is_sharegpt = "from" in turn and "value" in turn
        who, says = ("from", "value") if is_sharegpt else ("role", "content")
        role = turn.get(who)
        if not isinstance(role, str) or not role:
            raise SourceError(f"message {index + 1} has no {who}; it has {', '.join(sorted(turn))}")
        role = _SHAREGPT_ROLES.get(role, role) if is_sharegpt else role
        content = _content(turn.get(says), index)
        others = {k: v for k, v in turn.items() if k not in {who, says, "weight"} and v is not None}
        messages.append({"role": role, "content": content, **others})
        if (
            role == ASSISTANT and turn.get("weight") == 0
        ):  # as OpenAI's files mark turns to pass over
            untrained.add(index)
        if role == ASSISTANT and not content.strip() and not others.get("tool_calls"):
            raise SourceError(
                f"message {index + 1} is an assistant turn without words, which would teach to say nothing; write the "
                "answer, or leave the sample out"
            )
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise SourceError(
            f"has no assistant turn, so there is nothing to learn (its roles: {roles})"
        )
    return Chat(tuple(messages), _tools(tools), frozenset(untrained))


def _content(value: object, index: int) -> str:
    """The words of a message, parts of text joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise SourceError(f"the content of message {index + 1} must be a text or a list of parts")
    words = []
    for part in value:
        text = (
            part
            if isinstance(part, str)
            else part.get("text")
            if isinstance(part, Mapping)
            else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise SourceError(
                f"message {index + 1} holds a part that is no text ({kind}); only text is trained on"
            )
        words.append(text)
    return "".join(words)


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    if isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value):
        return tuple(dict(one) for one in value)
    raise SourceError("the column 'tools' must hold a list of objects")


def _pair(row: Mapping[str, Any], columns: Columns) -> Sample:
    *asked, answered = (row.get(name) for name in columns.names)
    if len(asked) == 1 and isinstance(asked[0], (list, tuple)):
        return _conversational_pair(asked[0], answered, columns)
    parts = [part for part in asked if part is not None]
    if not all(isinstance(part, str) for part in (*parts, answered)):
        raise SourceError(f"the columns {', '.join(columns.names)} must hold texts")
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise SourceError("the prompt is empty; for texts without prompts name the column as text")
    if not str(answered).strip():
        raise SourceError(
            "the completion is empty, which would teach to say nothing; leave the row out"
        )
    if not columns.as_chat:
        return Plain(str(answered), prompt)
    return Chat(({"role": "user", "content": prompt}, {"role": ASSISTANT, "content": answered}))


def _conversational_pair(asked: Sequence[Any], answered: object, columns: Columns) -> Chat:
    """Prompt and completion that are lists of messages: one conversation, trained in its second part only."""
    if not isinstance(answered, (list, tuple)):
        raise SourceError(
            f"{columns.names[0]!r} holds messages and {columns.names[-1]!r} does not; both must, or neither"
        )
    chat = _conversation([*asked, *answered], None)
    return Chat(chat.messages, (), chat.untrained | frozenset(range(len(asked))))
