"""What a recipe's texts become: how much of them is trained, what begins and ends them, and some of them in spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.app.parts import BASE, parts_of
from outsize.app.tasks.protocol import Preview, Shown, Table
from outsize.app.text_corpus import Texts, documents_of, open_tokens, packed
from outsize.base.errors import SourceError
from outsize.data.cache import ContentCache
from outsize.data.preview import previews

if TYPE_CHECKING:
    from outsize.base.progress import Progress
    from outsize.data.documents import Documents
    from outsize.recipes.recipe import Recipe

_HEADS = (
    "set",
    "samples",
    "tokens",
    "trained",
    "without BOS",
    "several BOS",
    "EOS",
    "too long",
    "tokens cut",
    "held out",
    "rows",
)


def preview_texts(
    recipe: Recipe, num_samples: int, *, offline: bool, progress: Progress
) -> Preview:
    """Counts of every set and some of its samples; also of sets that training refuses, and why it does.

    Raises: SourceError naming every fault in the files.
    """

    def tell(done: int, total: int) -> None:
        progress.advance("read texts", done, total, "files")

    tokens = open_tokens(parts_of(recipe)[BASE], offline=offline)
    cache = ContentCache(recipe.cache_folder() / "conditions")
    documents = documents_of(recipe, tokens, cache, tell)
    shown = tuple(
        Shown(
            f"{one.place}: {one.num_tokens} tokens, {one.num_trained} trained",
            tuple((span.text, span.is_trained) for span in one.spans),
        )
        for one in previews(documents, tokens.tokenizer, num_samples)
    )
    try:
        texts = packed(recipe, tokens, documents)
    except SourceError as error:
        return Preview(_plain_table(documents), shown, fault=error)
    return Preview(_table(texts), shown, texts.corpus.warnings)


def _table(texts: Texts) -> Table:
    corpus = texts.corpus
    rows = tuple(
        (
            facts.name,
            str(facts.num_documents),
            str(facts.num_tokens),
            f"{facts.trained_share:.1%}",
            str(facts.num_without_bos),
            str(facts.num_several_bos),
            str(facts.num_eos),
            str(facts.num_long),
            str(facts.num_lost),
            str(facts.num_held_out),
            str(corpus.rows_per_epoch(number)),
        )
        for number, facts in enumerate(corpus.facts)
    )
    return Table("What is learned from", _HEADS, rows)


def _plain_table(documents: Documents) -> Table:
    """What can be counted before anything is fitted into rows."""
    rows = []
    for number, item in enumerate(documents.choice.sets):
        files = [one for one in documents.files if one.set_index == number]
        num_tokens = sum(len(one.tokens) for one in files)
        num_trained = sum(int(one.trained.sum()) for one in files)
        num_samples = sum(len(one.rows) for one in files)
        share = f"{num_trained / max(num_tokens, 1):.1%}"
        rows.append((item.path.name, str(num_samples), str(num_tokens), share))
    return Table("What would be learned from", _HEADS[:4], tuple(rows))
