"""Texts of a recipe with the tokenizer of its base: read, worded, tokenised and packed; no encoder is needed for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outsize.app.parts import BASE, parts_of
from outsize.base.errors import SourceError
from outsize.base.files import file_digest, json_digest
from outsize.base.progress import OnProgress
from outsize.data.cache import ContentCache
from outsize.data.documents import Documents, read_documents
from outsize.data.text_corpus import TextBatch, TextCorpus
from outsize.families._text import load_tokenizer
from outsize.families.protocol import LanguageFamily
from outsize.weights.locate import locate_folder

if TYPE_CHECKING:
    from outsize.app.parts import Part
    from outsize.app.site import Site
    from outsize.recipes.recipe import Recipe

# What shapes tokens, of all that may lie beside weights.
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
_BEGINNING_TOKENS = 32  # of a plain text, taken as a prompt where the recipe names none


@dataclass(frozen=True, slots=True)
class Tokens:
    """A base's tokenizer (of transformers). inputs: what identifies it, as JSON values."""

    folder: Path
    tokenizer: Any
    inputs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts of a recipe, ready to be drawn."""

    tokens: Tokens
    documents: Documents
    corpus: TextCorpus

    def cached(self) -> tuple[Path, ...]:
        """Texts are encoded by no model."""
        return ()

    def digest(self) -> str:
        """Of all documents and how they are used."""
        return self.corpus.digest()

    def names_of(self, step: int) -> list[str]:
        """File and row of every document."""
        return self.corpus.places_of(step)

    def sizes_of(self, _step: int) -> tuple[int, ...]:
        """Rows are alike."""
        return ()

    def batch(self, step: int, place: int) -> TextBatch:
        """Packed rows."""
        return self.corpus.batch(step, place)

    def num_trained(self, step: int) -> int:
        """Tokens that are trained in a whole update."""
        return self.corpus.num_trained(step)

    def held_out(self, max_rows: int) -> Iterator[TextBatch]:
        """Batches that are never trained on, always the same ones."""
        count = min(self.corpus.num_held_out_batches, -(-max_rows // self.corpus.batch_rows))
        return (self.corpus.held_out_batch(number) for number in range(count))

    def beginnings(self, count: int) -> list[list[int]]:
        """Tokens of held-out documents up to where the first trained one would be written."""
        found: list[list[int]] = []
        for number in range(self.corpus.num_held_out_batches):
            for beginning in _beginnings(self.corpus.held_out_batch(number)):
                if len(found) == count:
                    return found
                found.append(beginning)
        return found


def open_tokens(part: Part, *, offline: bool) -> Tokens:
    """The tokenizer of a base, from the folder of its source.

    Raises: SourceError when there is none.
    """
    family = cast("LanguageFamily", part.family)
    source = part.source if part.revision is None else f"{part.source}@{part.revision}"
    folder = locate_folder(source, family.tokenizer_folder, offline=offline)
    files = sorted({one for pattern in _TOKENIZER_FILES for one in folder.glob(pattern)})
    digests = {one.relative_to(folder).as_posix(): file_digest(one) for one in files}
    if not digests:
        raise SourceError(
            f"{folder} holds no tokenizer; copy tokenizer.json, tokenizer_config.json and the chat template there from the "
            "model's repository"
        )
    tokenizer = load_tokenizer(folder)
    return Tokens(folder, tokenizer, {"tokenizer": json_digest(digests)})


def read_texts(
    recipe: Recipe, cache: ContentCache, *, offline: bool, progress: OnProgress | None = None
) -> Texts:
    """Read, tokenise and pack all that a recipe names; opens no model. progress: counts files.

    Raises: SourceError naming every fault with file and row, and a tokenizer that is another model's.
    """
    tokens = open_tokens(parts_of(recipe)[BASE], offline=offline)
    return packed(recipe, tokens, documents_of(recipe, tokens, cache, progress))


def documents_of(
    recipe: Recipe, tokens: Tokens, cache: ContentCache, progress: OnProgress | None = None
) -> Documents:
    """All texts that a recipe names, tokenised. Raises: as read_texts."""
    documents = read_documents(
        recipe.texts, tokens.tokenizer, inputs=tokens.inputs, cache=cache, progress=progress
    )
    part = parts_of(recipe)[BASE]
    vocabulary = cast("LanguageFamily", part.family).vocabulary(part.variant)
    largest = max((int(one.tokens.max()) for one in documents.files if len(one.tokens)), default=0)
    if largest >= vocabulary:
        raise SourceError(
            f"the tokenizer in {tokens.folder} gives token {largest}, but {part.family_name}.{part.variant} has {vocabulary} "
            "of them: it belongs to another model; take the one from the model's own repository"
        )
    return documents


def packed(recipe: Recipe, tokens: Tokens, documents: Documents) -> Texts:
    """The documents fitted into rows.

    Raises: SourceError when nothing, or by accident everything, would be trained, or a sample is refused for its length.
    """
    train = recipe.train
    corpus = TextCorpus(documents, seed=train.seed, batch=train.batch, accumulate=train.accumulate)
    return Texts(tokens, documents, corpus)


def build_texts(site: Site) -> Texts:
    """The corpus of a site's recipe; what a person should know of it is said."""

    def tell(done: int, total: int) -> None:
        site.progress.advance("read texts", done, total, "files")

    with site.stages.stage("read texts"):
        texts = read_texts(site.recipe, site.cache, offline=site.offline, progress=tell)
    for facts in texts.corpus.facts:
        site.journal.write("texts", **facts.describe())
        site.progress.say(
            f"{facts.name}: {facts.num_documents} samples, {facts.num_tokens:,} tokens, {facts.trained_share:.0%} of them "
            f"trained; {facts.num_held_out} samples held out"
        )
    for warning in texts.corpus.warnings:
        site.progress.say(f"warning: {warning}")
        site.journal.write("warning", what=warning)
    return texts


def missing_texts(recipe: Recipe) -> list[Path]:
    """Files and folders that the recipe names and that are not there."""
    return [one.path for one in recipe.texts.sets if not one.path.exists()]


def _beginnings(batch: TextBatch) -> Iterator[list[int]]:
    """Of each document of a batch: up to the first token from which one is predicted that is trained."""
    for ids, labels, segments in zip(batch.input_ids, batch.labels, batch.segments, strict=True):
        for segment in range(int(segments.max()) + 1):
            is_own = segments == segment
            own, trained = ids[is_own], (labels[is_own] >= 0).nonzero()
            first = int(trained[0]) if len(trained) else len(own) - 1
            if first <= 1:  # a plain text is trained from its first token on
                first = min(_BEGINNING_TOKENS, max(1, len(own) // 2)) - 1
            yield own[: first + 1].tolist()
