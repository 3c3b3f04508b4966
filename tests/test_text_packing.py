"""Packing and the texts' schedule: each document once an epoch, exact boundaries, nothing but pure functions."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st
from text_support import LLAMA, chat_row, plain, tokenizer_of, write_lines

from outsize.base.errors import SourceError
from outsize.data.conversations import Columns
from outsize.data.documents import Documents, File, read_documents
from outsize.data.fitting import fit
from outsize.data.packing import IGNORED, hashed_order, pack_epoch, pack_row
from outsize.data.text_corpus import TextBatch, TextCorpus
from outsize.recipes.text import TextChoice, TextSet

WINDOW = 16
LENGTHS = st.lists(st.integers(1, WINDOW), min_size=1, max_size=60)
SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=25)
SEEDS = st.integers(0, 2**63 - 1)


def documents_of(
    sizes: list[int], seed: int = 0, *, kind: Any = "messages", **choice: Any
) -> Documents:
    """One set of documents whose tokens are all different, so that each can be told apart in a row."""
    rng = np.random.default_rng(seed)
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    trained = rng.random(begins[-1]) < 0.6
    trained[begins[:-1]] = False
    trained[begins[1:] - 1] = True
    tokens = np.arange(1, begins[-1] + 1, dtype=np.int32)
    rows = np.arange(1, len(sizes) + 1)
    file = File(
        Path("a.jsonl"), 0, tokens, trained, begins, rows, np.zeros((len(sizes), 3), np.int64)
    )
    made = TextChoice(
        sets=(TextSet(path=Path("a.jsonl"), train_on="everything"),),
        **({"window": WINDOW, "held_out": 0.0} | choice),
    )
    return Documents(made, (file,), (Columns(kind, ("messages",)),), None, None, 0)


def first(corpus: TextCorpus, count: int) -> list[TextBatch]:
    return [corpus.batch(*divmod(number, corpus.accumulate)) for number in range(count)]


@UNHURRIED
@given(LENGTHS, SEEDS, st.integers(0, 5))
def test_every_document_is_in_exactly_one_row_of_an_epoch_and_no_row_is_longer_than_the_window(
    lengths: list[int], seed: int, epoch: int
) -> None:
    rows = pack_epoch(lengths, WINDOW, key=(seed, epoch))
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= WINDOW for row in rows)
    assert rows == pack_epoch(lengths, WINDOW, key=(seed, epoch))


@UNHURRIED
@given(LENGTHS, SEEDS)
def test_rows_are_as_full_as_best_fit_promises(lengths: list[int], seed: int) -> None:
    """No two rows could be one, and best fit decreasing needs at most 11/9 of the fewest rows and one (Johnson 1973)."""
    rows = pack_epoch(lengths, WINDOW, key=(seed,))
    filled = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > WINDOW
    assert len(rows) <= 11 / 9 * max(1, -(-sum(lengths) // WINDOW)) + 1 + sum(
        n > WINDOW / 2 for n in lengths
    )


def test_epochs_and_seeds_change_company_and_order_and_unpacked_rows_hold_one_document() -> None:
    lengths = [1 + i % 7 for i in range(80)]
    plans = [pack_epoch(lengths, WINDOW, key=(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({frozenset(map(frozenset, plan)) for plan in plans}) == 4
    unpacked = pack_epoch(lengths, WINDOW, key=(0, 0), is_packed=False)
    assert sorted(unpacked) == [(i,) for i in range(80)]
    assert unpacked != tuple(sorted(unpacked))


def test_the_hashed_order_is_the_same_on_every_machine_and_spreads_evenly() -> None:
    """The numbers were computed with Python's whole numbers from SplitMix64's published constants."""
    assert hashed_order(8, (1, "x")).tolist() == _order_by_whole_numbers(8, "1/x")
    where = [hashed_order(10, (seed,)).tolist().index(0) for seed in range(2000)]
    counts = Counter(where)
    assert all(abs(counts[place] - 200) < 70 for place in range(10))  # five standard deviations


def _order_by_whole_numbers(count: int, text: str) -> list[int]:
    import hashlib

    base = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def mix(number: int) -> int:
        state = (base + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    return sorted(range(count), key=mix)


@UNHURRIED
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 7))
def test_a_row_has_exact_boundaries_and_never_predicts_from_the_document_before(
    lengths: list[int], room: int
) -> None:
    begins = np.cumsum([0, *lengths])
    documents = [
        (np.arange(begin, begin + n, dtype=np.int32) + 100, np.arange(n) % 2 == 1)
        for begin, n in zip(begins, lengths, strict=False)
    ]
    row = pack_row(documents, int(begins[-1]) + room, padding=7)
    for t in range(len(row.input_ids)):
        inside = [i for i, n in enumerate(lengths) if begins[i] <= t < begins[i] + n]
        assert row.segments[t] == (inside[0] if inside else -1)
        assert row.position_ids[t] == (t - begins[inside[0]] if inside else 0)
        assert row.input_ids[t] == (100 + t if inside else 7)
        follows = inside and t + 1 < begins[inside[0]] + lengths[inside[0]]
        is_trained = follows and (t + 1 - begins[inside[0]]) % 2 == 1
        assert row.labels[t] == (101 + t if is_trained else IGNORED)


@UNHURRIED
@given(SIZES, SEEDS, st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_batch_depends_on_data_seed_step_and_place_and_not_on_what_was_asked_before(
    sizes: list[int], seed: int, batch: int, accumulate: int, order: random.Random
) -> None:
    documents = documents_of(sizes)
    expected = first(TextCorpus(documents, seed=seed, batch=batch, accumulate=accumulate), 12)
    other = TextCorpus(documents, seed=seed, batch=batch, accumulate=accumulate)
    numbers = list(range(12))
    order.shuffle(numbers)
    for number in numbers:
        made = other.batch(*divmod(number, accumulate))
        for name in ("input_ids", "labels", "position_ids", "segments", "loss_weight_B"):
            assert torch.equal(getattr(made, name), getattr(expected[number], name))
        assert made.input_ids.shape == made.segments.shape == (batch, WINDOW)
        assert (made.input_ids.dtype, made.segments.dtype) == (torch.int64, torch.int32)


@UNHURRIED
@given(SIZES, SEEDS)
def test_an_epoch_of_split_documents_predicts_every_trained_token_exactly_once(
    sizes: list[int], seed: int
) -> None:
    documents = documents_of(sizes, long_samples="split")
    corpus = TextCorpus(documents, seed=seed)
    labels: Counter[int] = Counter()
    for step in range(corpus.rows_per_epoch(0)):
        made = corpus.batch(step, 0)
        labels.update(made.labels[made.labels != IGNORED].tolist())
        assert corpus.num_trained(step) == int((made.labels != IGNORED).sum())
        has_label = made.labels[0] != IGNORED
        assert torch.equal(made.labels[0][has_label], made.input_ids[0].roll(-1)[has_label])
    file = documents.files[0]
    assert labels == Counter(file.tokens[file.trained].tolist())


@UNHURRIED
@given(SIZES)
def test_truncation_keeps_beginnings_and_is_counted_and_said(sizes: list[int]) -> None:
    documents = documents_of(sizes)
    (fitted,) = fit(documents)
    long = [size for size in sizes if size > WINDOW]
    assert (fitted.facts.num_long, fitted.facts.num_lost) == (
        len(long),
        sum(long) - WINDOW * len(long),
    )
    file = documents.files[0]
    for i in range(len(fitted.trained.file)):
        begin = file.begins[fitted.trained.document[i]]
        assert fitted.trained.begin[i] == begin
        assert fitted.trained.end[i] == min(
            begin + WINDOW, file.begins[fitted.trained.document[i] + 1]
        )
    said = "\n".join(fitted.facts.sentences(documents.choice))
    assert (
        f"{len(long)} of {len(sizes)} samples are longer than the window of 16 tokens" in said
    ) == bool(long)


def test_samples_longer_than_the_window_are_refused_where_the_recipe_says_so() -> None:
    with pytest.raises(
        SourceError, match=r"2 samples are longer than the window of 16 tokens; widen it"
    ) as caught:
        fit(documents_of([5, 17, 16, 40], long_samples="refuse"))
    assert "a.jsonl: line 2: 17 tokens" in str(caught.value)
    assert "a.jsonl: line 4: 40 tokens" in str(caught.value)


@UNHURRIED
@given(
    st.lists(st.integers(2, 14), min_size=4, max_size=40), st.floats(0.01, 0.9), st.integers(1, 50)
)
def test_what_is_held_out_is_never_trained_on_and_follows_from_the_documents_alone(
    sizes: list[int], share: float, limit: int
) -> None:
    options: Any = {"held_out": share, "held_out_limit": limit}
    documents = documents_of(sizes, **options)
    corpora = [TextCorpus(documents, seed=seed, batch=2) for seed in (1, 2)]
    held = [
        {int(one) for number in range(corpus.num_held_out_batches) for one in corpus.held_out_batch(number).input_ids.flatten()}
        for corpus in corpora
    ]  # fmt: skip
    assert held[0] == held[1]
    steps = corpora[0].rows_per_epoch(0)
    trained = {
        int(one) for step in range(steps) for one in corpora[0].batch(step, 0).input_ids.flatten()
    }
    assert (held[0] & trained) <= {0}, "padding is all they share"
    assert held[0] | trained | {0} == {0, *documents.files[0].tokens.tolist()}
    expected = min(max(1, min(round(share * len(sizes)), limit)), len(sizes) - 1)
    assert corpora[0].facts[0].num_held_out == expected


def test_a_document_that_is_there_twice_is_on_one_side_only(tmp_path: Path) -> None:
    rows = [chat_row("q", f"a {i % 10}") for i in range(40)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    choice = TextChoice(sets=(TextSet(path=path),), held_out=0.3, window=64)
    documents = read_documents(choice, tokenizer_of(plain(LLAMA)), inputs={})
    (fitted,) = fit(documents)
    sides = [
        {tuple(documents.files[0].document(i)[0].tolist()) for i in side.document}
        for side in (fitted.trained, fitted.held_out)
    ]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [7, 3]


def test_sets_keep_their_shares_of_rows_and_weights_follow_the_rows(tmp_path: Path) -> None:
    paths = [
        write_lines(
            tmp_path / f"{name}.jsonl", [chat_row("q", f"{name} {i}") for i in range(count)]
        )
        for name, count in (("yes", 40), ("no", 4))
    ]
    sets = (TextSet(path=paths[0]), TextSet(path=paths[1], share=0.25, loss_weight=0.5))
    choice = TextChoice(sets=sets, window=64, held_out=0.0)
    corpus = TextCorpus(
        read_documents(choice, tokenizer_of(plain(LLAMA)), inputs={}), seed=3, batch=4
    )
    for step in range(50):
        assert sorted(corpus.batch(step, 0).loss_weight_B.tolist()) == [0.5, 1.0, 1.0, 1.0]
    assert {place.split(":")[0] for place in corpus.places_of(0)} == set(map(str, paths))


def test_a_set_that_is_held_out_is_only_evaluated(tmp_path: Path) -> None:
    sets = (
        TextSet(path=write_lines(tmp_path / "a.jsonl", [chat_row("q", "yes")] * 3)),
        TextSet(
            path=write_lines(tmp_path / "b.jsonl", [chat_row("q", "no")] * 3), is_held_out=True
        ),
    )
    tokenizer = tokenizer_of(plain(LLAMA))
    documents = read_documents(TextChoice(sets=sets, window=64), tokenizer, inputs={})
    corpus = TextCorpus(documents, seed=0)
    assert corpus.rows_per_epoch(1) == 0
    assert [one.num_held_out for one in corpus.facts] == [0, 3]
    assert "nothing is held out" in corpus.warnings[0]
    held = tokenizer.decode(corpus.held_out_batch(0).input_ids[0].tolist())
    assert "no" in held
    assert "yes" not in held


def test_rows_are_shorter_than_the_window_only_where_all_texts_together_are() -> None:
    few = TextCorpus(documents_of([10, 20], window=1000), seed=0)
    assert few.batch(0, 0).input_ids.shape == (1, 64)
    many = TextCorpus(documents_of([90] * 30, window=1000), seed=0)
    assert {tuple(one.input_ids.shape) for one in first(many, 9)} == {(1, 1000)}
    unpacked = TextCorpus(documents_of([90] * 30, window=1000, pack=False), seed=0)
    assert first(unpacked, 1)[0].input_ids.shape == (1, 128)


def test_the_digest_follows_documents_and_choices_and_not_where_files_lie(tmp_path: Path) -> None:
    def digest(folder: str, answer: str = "yes", **choice: Any) -> str:
        path = write_lines(
            tmp_path / folder / "a.jsonl", [chat_row("q", answer), chat_row("q", "b")]
        )
        made = TextChoice(sets=(TextSet(path=path),), **({"window": 64} | choice))
        documents = read_documents(made, tokenizer_of(plain(LLAMA)), inputs={})
        return TextCorpus(documents, seed=0).digest()

    assert digest("one") == digest("two")
    assert len({digest("one"), digest("one", "no"), digest("one", window=65)}) == 3
