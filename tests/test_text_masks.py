"""Masks against transformers' own, made from a copy of the same template with marks of what the assistant writes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st
from text_support import GEMMA, LLAMA, QWEN, TEMPLATES, conversations, marked, plain, tokenizer_of

from outsize.base.errors import SourceError
from outsize.data.conversations import Chat
from outsize.data.templates import ChatTemplate, Worded
from outsize.data.tokens import Document, Tokenising, tokens_in

NAMES = st.sampled_from(sorted(TEMPLATES))


def word(template: str, messages: list[dict[str, Any]], train_on: Any = "assistant") -> Worded:
    return ChatTemplate(tokenizer_of(template)).word(Chat(tuple(messages)), train_on)


def document(
    tokenizer: Any, messages: list[dict[str, Any]], train_on: Any = "assistant"
) -> Document:
    tokenising = Tokenising(tokenizer, ChatTemplate(tokenizer))
    (made,) = tokenising.documents([tokenising.word(Chat(tuple(messages)), train_on)])
    return made


def reference(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Tokens and mask as transformers gives them for the marked copy."""
    made = tokenizer.apply_chat_template(
        messages,
        chat_template=marked(template),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return made["input_ids"], made["assistant_masks"]


def trained_texts(worded: Worded) -> list[str]:
    return [worded.text[begin:end] for begin, end in worded.spans]


@UNHURRIED
@given(NAMES, st.booleans(), conversations())
def test_tokens_and_masks_are_those_of_transformers_for_a_marked_copy_of_the_template(
    name: str, has_pieces: Any, messages: list[dict[str, str]]
) -> None:
    tokenizer = tokenizer_of(plain(TEMPLATES[name]), pieces=has_pieces)
    made = document(tokenizer, messages)
    tokens, mask = reference(tokenizer, TEMPLATES[name], messages)
    assert made.tokens.tolist() == tokens
    assert made.trained.astype(int).tolist() == mask
    assert made.num_turns == sum(one["role"] == "assistant" for one in messages)
    assert (made.num_dropped, made.num_open) == (0, 0)


@UNHURRIED
@given(NAMES, conversations())
def test_marks_of_the_template_itself_are_taken_at_their_word(
    name: str, messages: list[dict[str, str]]
) -> None:
    tokenizer = tokenizer_of(marked(TEMPLATES[name]))
    _, mask = reference(tokenizer, TEMPLATES[name], messages)
    assert document(tokenizer, messages).trained.astype(int).tolist() == mask


@UNHURRIED
@given(NAMES, st.booleans(), conversations())
def test_last_turn_trains_the_last_run_of_the_mask_and_everything_all_but_the_first_token(
    name: str, has_marks: Any, messages: list[dict[str, str]]
) -> None:
    tokenizer = tokenizer_of((marked if has_marks else plain)(TEMPLATES[name]))
    _, mask = reference(tokenizer, TEMPLATES[name], messages)
    last = max(i for i, is_trained in enumerate(mask) if is_trained)
    first = max((i + 1 for i in range(last) if not mask[i]), default=0)
    made = document(tokenizer, messages, "last_turn")
    assert np.flatnonzero(made.trained).tolist() == list(range(first, last + 1))
    everything = document(tokenizer, messages, "everything").trained
    assert everything.tolist() == [False] + [True] * (len(mask) - 1)


@UNHURRIED
@given(NAMES, conversations())
def test_tokenizers_whose_offsets_leave_blanks_out_give_the_same_mask(
    name: str, messages: list[dict[str, str]]
) -> None:
    """Byte-level tokenizers of the field trim: ` yes` is said to begin at its y, and a blank token to be empty."""
    template = plain(TEMPLATES[name])
    trimmed = document(tokenizer_of(template, trims=True), messages)
    whole = document(tokenizer_of(template), messages)
    assert trimmed.tokens.tolist() == whole.tokens.tolist()
    assert trimmed.trained.tolist() == whole.trained.tolist()


@pytest.mark.parametrize(
    ("name", "end"),
    [("gemma", "<turn|>"), ("qwen", "<|im_end|>"), ("mistral", "</s>"), ("llama", "<|eot_id|>")],
)
def test_every_turn_is_trained_to_its_end_token_which_need_not_be_that_of_the_text(
    name: str, end: str
) -> None:
    tokenizer = tokenizer_of(plain(TEMPLATES[name]))
    messages = [
        {"role": role, "content": f"{role} says"} for role in ("user", "assistant") for _ in "x"
    ] * 2
    made = document(tokenizer, messages)
    ids = [int(token) for token, is_last in zip(
        made.tokens, np.append(made.trained[:-1] & ~made.trained[1:], made.trained[-1]), strict=True
    ) if is_last]  # fmt: skip
    assert ids == [tokenizer.convert_tokens_to_ids(end)] * 2


@pytest.mark.parametrize("sets_bos", [False, True])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_document_begins_with_bos_once_where_template_or_tokenizer_sets_one(
    name: str,
    sets_bos: Any,
) -> None:
    tokenizer = tokenizer_of(plain(TEMPLATES[name]), sets_bos=sets_bos)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tokens = document(tokenizer, messages).tokens.tolist()
    has_bos = sets_bos or name != "qwen"
    assert tokens.count(tokenizer.bos_token_id) == has_bos
    assert (tokens[0] == tokenizer.bos_token_id) == has_bos


def test_thinking_of_earlier_turns_is_not_in_the_text_and_that_of_the_last_turn_is_trained() -> (
    None
):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nA"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nshort\n</think>\n\nB"},
    ]
    assert trained_texts(word(plain(QWEN), messages)) == [
        "A<|im_end|>",
        "short\n</think>\n\nB<|im_end|>",
    ]


def test_tool_calls_are_part_of_the_turn_whether_content_is_shown_or_not() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    calls = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}"
        "{{ SHOWN }}{% for c in m.tool_calls %}{{ '<tool_call>' + c.function.name + c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    for shown in ("m.content", "m.content + ('\\n' if m.content else '')", "''"):
        worded = word(calls.replace("SHOWN", shown), messages)
        assert trained_texts(worded) == ['<tool_call>look{"at": "x"}<|im_end|>', "done<|im_end|>"]


def test_a_turn_end_of_several_tokens_is_trained_whole_and_one_without_an_end_is_counted() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b"},
    ]
    words = "{% for m in messages %}{{ m.role + ': ' + m.content + END }}{% endfor %}"
    ends = word(words.replace("END", "' ~~~\\n'"), messages)
    assert trained_texts(ends) == ["a ~~~", "b ~~~"]
    assert ends.num_open == 0
    none = word(words.replace("END", "'\\n'"), messages)
    assert trained_texts(none) == ["a", "b"]
    assert none.num_open == 2


def test_turns_that_are_context_only_and_turns_that_the_template_leaves_out_are_not_trained() -> (
    None
):
    messages = tuple(
        {"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")
    )
    template = ChatTemplate(tokenizer_of(plain(LLAMA)))
    worded = template.word(Chat(messages, untrained=frozenset({1, 5})))
    assert trained_texts(worded) == ["assistant 1<|eot_id|>"]
    newest = plain(LLAMA).replace("in messages", "in messages[-4:]")
    kept = word(newest, [*messages])
    assert trained_texts(kept) == ["assistant 1<|eot_id|>", "assistant 2<|eot_id|>"]
    assert kept.num_dropped == 1


def test_a_template_that_asks_for_the_date_gives_the_same_text_on_every_day() -> None:
    dated = "{{ strftime_now('%d %b %Y') + '|' }}" + plain(LLAMA)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    one = ChatTemplate(tokenizer_of(dated), today="2024-07-26")
    assert one.word(Chat(messages)).text.startswith("26 Jul 2024|<s>")
    assert one.describe() != ChatTemplate(tokenizer_of(dated), today="2024-07-27").describe()


def test_options_reach_the_template_and_its_key() -> None:
    asking = plain(GEMMA).replace("{{ bos_token }}", "{{ bos_token + (mood or 'none') }}", 1)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    made = ChatTemplate(tokenizer_of(asking), options={"mood": "calm"})
    assert made.word(Chat(messages)).text.startswith("<s>calm<|turn>")
    assert made.describe() != ChatTemplate(tokenizer_of(asking)).describe()


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (plain(GEMMA), [("tool", "x"), ("assistant", "a")], "no role tool"),
        (plain(LLAMA), [("user", "q"), ("assistantx", "a")], "'assistantx' of message 2; did you mean 'assistant'"),
        (plain(TEMPLATES["mistral"]), [("user", "q"), ("tool", "t"), ("assistant", "a")], "role 'tool'"),
        (plain(LLAMA) + "{{ messages[-1].content }}", [("user", "q"), ("assistant", "a")], "twice"),
        (plain(LLAMA) + "{{ messages[-1].content | length }}", [("user", "q"), ("assistant", "a")], "{% generation %}"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_in_one_sentence(
    template: str, messages: list[tuple[str, str]], said: str
) -> None:
    with pytest.raises(SourceError, match="chat template") as caught:
        word(template, [{"role": role, "content": text} for role, text in messages])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused_with_remedies() -> None:
    with pytest.raises(
        SourceError, match=r"no chat template.*chat_template\.jinja.*as_chat: false"
    ):
        ChatTemplate(tokenizer_of(None))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_each_character_belongs_to_a_token_so_spans_that_cover_the_text_train_all_tokens(
    widths: list[int], data: Any
) -> None:
    ends = np.cumsum(widths).tolist()
    offsets = [
        (
            data.draw(st.integers(begin, end)),
            end,
        )  # blanks trimmed from the front, all of them at most
        for begin, end in pairwise([0, *ends])
    ]
    cut = data.draw(st.integers(0, ends[-1]))
    assert tokens_in(offsets, [(0, cut), (cut, ends[-1])]).all()
    one, other = tokens_in(offsets, [(0, cut)]), tokens_in(offsets, [(cut, ends[-1])])
    assert (one & other).sum() == (cut not in {0, *ends})
