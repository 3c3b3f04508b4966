"""The recipe: what a person asks for, the same in the file and in memory.

Frozen and strict: an unknown key, a number written as text or a bad value is refused, never repaired. Defaults stand
here and nowhere else, and none depends on the machine. Every field carries its meaning, so `outsize recipe --explain`
prints this file and cannot drift from it. Names of plug-ins (families, formats, optimizers, placements) are plain text
here: recipes rank below them, so `plan` checks them against the catalogues.

Reading YAML, with line numbers, is `load.py`'s work.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from outsize.base.files import json_digest
from outsize.recipes.adapter import AdapterChoice
from outsize.recipes.data import DataChoice
from outsize.recipes.numbers import numbers_digest
from outsize.recipes.people import PeopleChoice
from outsize.recipes.pictures import PictureChoice
from outsize.recipes.saving import CheckpointChoice, EvaluateChoice
from outsize.recipes.section import Added, AsTuple, Bytes, FilePath, Section, Text
from outsize.recipes.showing import CompareChoice, PreviewChoice
from outsize.recipes.text import TextChoice
from outsize.recipes.training import TrainChoice

# Windows keeps these names for devices, with any ending; a run folder must exist on every system.
_WINDOWS_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")


class FormatChoice(Section):
    """A format by name with its options; in the file `nf4` or `{name: nf4, group: 64}`."""

    name: Text = Field(description="Name of the format (a file in outsize/formats).")
    options: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="Options of the format, written beside its name."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and not isinstance(value.get("options"), dict):
            options = {key: item for key, item in value.items() if key != "name"}
            return {"name": value["name"], "options": options} if "name" in value else value
        return value

    @model_serializer(mode="plain")
    def _to_short_form(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}


def rest_format(kind: Literal["base", "text", "image"]) -> FormatChoice:
    """How a model keeps what it does not pack: a codec's convolutions decide the colours and stay exact."""
    return FormatChoice(name="plain", options={"dtype": "fp32" if kind == "image" else "bf16"})


class ComponentChoice(Section):
    """Where one text encoder or image codec comes from and how it is held."""

    source: Text | None = Field(
        default=None,
        description="Folder, file or hub id of this part; null: the base's source, in the part's own sub-folder.",
    )
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit when the source is a hub id; null: the newest.",
    )
    tokenizer: Annotated[Text | None, Added()] = Field(
        default=None,
        description="Text encoders: folder or hub id with the tokenizer, when the source is a single file that has none "
        "beside it; null: beside the weights.",
    )
    format: FormatChoice | None = Field(
        default=None,
        description="Format of its matrices; null: the base's for text encoders, none for image codecs.",
    )


class BaseChoice(Section):
    """The frozen model that is trained on."""

    family: Text = Field(description="Architecture (a file in outsize/families), as in flux2.")
    variant: Text = Field(description="Size or edition of the architecture, as in dev or klein-4b.")
    source: Text = Field(
        description="Folder or file on this machine, or hub id, with the weights; nothing is changed there."
    )
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit when the source is a hub id; null: the newest.",
    )
    format: FormatChoice = Field(
        default=FormatChoice(name="nf4"),
        description="How frozen matrices are held: a name, or {name: nf4, group: 64} with options.",
    )
    components: Annotated[dict[str, ComponentChoice], Field()] = Field(
        default_factory=dict,
        description="Other choices for a text encoder or image codec, by slot (text_encoder, vae, ...).",
    )

    def component(self, slot: str) -> ComponentChoice:
        """The choice for one slot; all null when the recipe does not speak of it."""
        return self.components.get(slot, ComponentChoice())

    def component_format(self, slot: str, kind: Literal["text", "image"]) -> FormatChoice:
        """The format of one conditioner; image codecs are small and stay as they are unless the recipe says."""
        chosen = self.component(slot).format
        if chosen is not None:
            return chosen
        return self.format if kind == "text" else FormatChoice(name="plain")


class PlacementChoice(Section):
    """Where the frozen blocks lie while training; changes no number."""

    kind: Text = Field(
        default="auto",
        description="resident (on the device), stream (copied in block by block), or auto (as planned).",
    )
    slots: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="Blocks that the device holds at once when streaming; null: 3, or 2 where the card is too small.",
    )
    resident_bytes: Bytes | None = Field(
        default=None,
        description="Blocks kept on the device while others stream, as in '4 GiB'; null: none when kind is stream, as "
        "many as fit when it is auto.",
    )
    pinned_bytes: Bytes | None = Field(
        default=None,
        description="Page-locked host memory for streamed blocks; what exceeds it is kept in ordinary memory or on disk; "
        "null: as planned.",
    )
    pageable_bytes: Bytes | None = Field(
        default=None,
        description="Ordinary host memory for streamed blocks that are not pinned; what exceeds it is read from the store "
        "each time; null: as planned.",
    )
    offload_inputs: bool | None = Field(
        default=None,
        description="Keep the blocks' inputs in host memory between the way up and the way down; null: when the card is "
        "too small for them.",
    )
    vocabulary_on_host: bool | None = Field(
        default=None,
        description="Keep token table and head of a language base in host memory, from where rows and tiles are brought; null: "
        "when the card is too small for them.",
    )
    recompute: bool | None = Field(
        default=None,
        description="Run resident blocks again for backward instead of keeping what they computed; null: except on a CPU "
        "with room to spare. Streamed blocks always run again.",
    )


class Recipe(Section):
    """Everything a person asks for."""

    name: str = Field(description="Names the run folder: letters, digits, '.', '_' and '-'.")
    base: BaseChoice = Field(description="The frozen model that is trained on.")
    data: DataChoice = Field(description="What is learned from.")
    adapter: AdapterChoice = Field(
        default_factory=AdapterChoice, description="What is trained: a low-rank adapter."
    )
    train: TrainChoice = Field(default_factory=TrainChoice, description="How it is trained.")
    placement: PlacementChoice = Field(
        default_factory=PlacementChoice,
        description="Where the frozen blocks lie while training; changes no number.",
    )
    checkpoints: CheckpointChoice = Field(
        default_factory=CheckpointChoice, description="What is saved on the way."
    )
    evaluate: EvaluateChoice = Field(
        default_factory=EvaluateChoice,
        description="What is measured on the way, on data that is never trained on.",
    )
    compare: CompareChoice = Field(
        default_factory=CompareChoice,
        description="What `outsize compare` and `outsize sample` make, with the adapter and without.",
    )
    previews: PreviewChoice = Field(
        default_factory=PreviewChoice,
        description="Pictures or texts made while training; they change no bit of it.",
    )
    track: Annotated[tuple[Text, ...], AsTuple] = Field(
        default=(),
        description="Programs that are told of every step as well (files in outsize/runs/trackers): tensorboard, trackio. The "
        "run folder and its report need none.",
    )
    on_stall: Literal["stop", "resume"] = Field(
        default="stop",
        description="When the card stops getting anywhere: save and stop, saying why; or go on in a fresh process from the last "
        "checkpoint.",
    )
    people: PeopleChoice = Field(
        default_factory=PeopleChoice,
        description="Whom the data show, and who asks; see `outsize registry`.",
    )
    runs: FilePath = Field(default=Path("runs"), description="Folder of run folders.")
    cache: FilePath | None = Field(
        default=None,
        description="Folder of prepared stores and caches; null: this user's cache folder.",
    )

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not _FOLDER_NAME.fullmatch(value) or _WINDOWS_DEVICES.fullmatch(value):
            raise ValueError(
                "must name a folder on every system: 1 to 100 letters, digits, '.', '_' or '-', "
                "not beginning or ending with '.' or beginning with '-', and no device name such as 'con'"
            )
        return value

    @property
    def pictures(self) -> PictureChoice:
        """The data of a recipe that learns from pictures."""
        assert isinstance(self.data, PictureChoice), "the task of the base's family has checked it"
        return self.data

    @property
    def texts(self) -> TextChoice:
        """The data of a recipe that learns from text."""
        assert isinstance(self.data, TextChoice), "the task of the base's family has checked it"
        return self.data

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON values; `load.recipe_from_json` reads it back."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 over everything asked for, hexadecimal."""
        return json_digest(self.to_json())

    def numbers_digest(self) -> str:
        """SHA-256 over what decides the numbers of a step: equal for recipes that may resume each other; see numbers.py."""
        return numbers_digest(self)

    def cache_folder(self) -> Path:
        """Folder of stores and caches, the user's own one unless the recipe says."""
        if self.cache is not None:
            return self.cache
        import platformdirs

        return Path(platformdirs.user_cache_dir("outsize", appauthor=False))

    def run_folder(self) -> Path:
        """Folder of this recipe's run."""
        return self.runs / self.name
