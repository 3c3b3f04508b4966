"""Recipes: strict reading with lines, explanations that cannot drift, digests, and the `recipe` command."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import outsize
from outsize.base.errors import RecipeError
from outsize.cli.main import main
from outsize.recipes.explain import explain
from outsize.recipes.load import (
    load_recipe,
    parse_recipe,
    recipe_from_json,
    resolve_source,
)
from outsize.recipes.numbers import _without_unused_additions
from outsize.recipes.recipe import FormatChoice, Recipe
from outsize.recipes.section import Added, Section, sections_in
from outsize.recipes.text import TextChoice, TextSet

MINIMAL = """\
name: cat
base: {family: flux2, variant: dev, source: some/model}
data:
  sets:
    - folder: pictures
"""
FILLED = {
    "name": "cat",
    "base.family": "flux2",
    "base.variant": "dev",
    "base.source": "some/model",
    "data.sets.folder": "pictures",
}
TEXT = """\
name: chat
base: {family: llama, variant: tiny, source: some/model}
data:
  sets:
    - path: talks.jsonl
"""
FILLED_FOR_TEXT = {
    **{key: value for key, value in FILLED.items() if key.startswith("base")},
    "name": "chat",
    "base.family": "llama",
    "base.variant": "tiny",
    "data.sets.path": "talks.jsonl",
}
_ABOUT_TEXT = {TextChoice, TextSet}


def parse(text: str, folder: Path = Path("/recipes")) -> Recipe:
    return parse_recipe(text, file="cat.yaml", folder=folder)


def fault_of(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    return str(caught.value)


# --- reading -------------------------------------------------------------------------------------


def test_a_minimal_recipe_gets_the_documented_defaults() -> None:
    """Three things must be said: what is trained on, with what, and under which name."""
    recipe = parse(MINIMAL)
    assert recipe.base.format == FormatChoice(name="nf4")
    assert (recipe.adapter.rank, recipe.adapter.effective_alpha) == (16, 16.0)
    assert recipe.adapter.roles == ("attention", "mlp")
    assert (recipe.train.steps, recipe.train.optimizer, recipe.train.epsilon) == (
        1000,
        "adamw",
        1e-8,
    )
    assert recipe.placement.kind == "auto"
    assert recipe.compare.seeds == (0,)


def test_a_mistyped_key_is_named_with_its_line_and_the_nearest_real_one() -> None:
    """The golden message for the commonest mistake."""
    text = MINIMAL + "train:\n  lerning_rate: 1e-4\n"
    assert fault_of(text) == (
        "cat.yaml: line 7: train.lerning_rate: unknown key; did you mean 'learning_rate'?"
    )


def test_all_faults_are_listed_at_once_in_the_order_of_the_file() -> None:
    """A person corrects a file once, not once for each fault."""
    text = """\
name: cat
base:
  family: flux2
  variant: [dev]
data:
  resolution: "1024"
  sets: []
train:
  steps: many
  betas: [0.9]
  clip_norm: .nan
  timesteps: {law: shited}
adapter: {rank: 0, roles: [attentionn]}
placement: {resident_bytes: 4 gigs}
compare: 5
"""
    head, *lines = fault_of(text).splitlines()
    assert head == "cat.yaml: 12 faults"
    expected = [
        ("line 2", "base.source: missing"),
        ("line 4", "base.variant: found a list, must be text"),
        ("line 6", "data.resolution: found '1024', must be a whole number"),
        ("line 7", "data.sets: found an empty list, must have at least 1"),
        ("line 9", "train.steps: found 'many', must be a whole number"),
        ("line 10", "train.betas[1]: missing"),
        ("line 11", "train.clip_norm: found nan, must be a finite number"),
        ("line 12", "did you mean 'shifted'?"),
        ("line 13", "adapter.rank: found 0, must be greater than or equal to 1"),
        (
            "line 13",
            "adapter.roles[0]: found 'attentionn', must be 'attention', 'linear_attention'",
        ),
        ("line 14", "placement.resident_bytes: found '4 gigs'"),
        ("line 15", "compare: found 5, must be a mapping with the keys prompts"),
    ]
    for line, (place, message) in zip(lines, expected, strict=True):
        assert line.strip().startswith(f"{place}: "), line
        assert message in line


def test_a_key_given_twice_is_a_fault_that_names_both_lines() -> None:
    """YAML readers keep the last one and say nothing."""
    text = MINIMAL + "train:\n  steps: 5\n  seed: 1\n  steps: 6\n"
    assert fault_of(text) == "cat.yaml: line 9: train.steps: given twice, first in line 7"


def test_numbers_and_words_are_read_by_yaml_1_2() -> None:
    """In YAML 1.1, which PyYAML follows, 1e-4 is text, `no` is false, 1:30 is ninety and 012 is ten."""
    recipe = parse(
        MINIMAL.replace("folder: pictures", "folder: pictures\n      trigger: no")
        + "train: {learning_rate: 1e-4, steps: 012}\ncompare: {prompts: [yes, 1:30, 2024-01-01]}\n"
    )
    assert recipe.train.learning_rate == 1e-4
    assert recipe.train.steps == 12
    assert recipe.data.sets[0].trigger == "no"
    assert recipe.compare.prompts == ("yes", "1:30", "2024-01-01")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1: not readable as YAML"),
        ("a: b: c", "line 1: not readable as YAML"),
        ("- 1\n- 2", "must be a mapping"),
        ("", "name: missing"),
        ("a: &x [*x]", "contains itself"),
        ("a: !!python/object/apply:os.system [x]", "missing"),
        ("a: !!python/name:os.system x", "has no meaning in a recipe"),
        ("? [1]\n: 2", "a key must be a word"),
        ("a: 1\n---\nb: 2", "not readable as YAML"),
        ("a: \x00", "not readable as YAML"),
        ("[" * 1200, "nested too deeply"),
    ],
)
def test_what_is_no_recipe_is_refused_with_a_reason(text: str, message: str) -> None:
    """No tag is ever obeyed, and nothing ends in a traceback."""
    assert message in fault_of(text)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab:{}[]&*!-?,|>'\"#%\n \t0.1~", max_size=60))
def test_any_text_gives_a_recipe_or_a_recipe_error(text: str) -> None:
    """Fuzz of the reader: whatever is in the file, the message is ours."""
    with pytest.raises(RecipeError):
        parse(text)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """Missing, and not text."""
    with pytest.raises(RecipeError, match=r"none\.yaml: the recipe cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"name: \xff")
    with pytest.raises(RecipeError, match="byte 6 is not UTF-8"):
        load_recipe(tmp_path / "bad.yaml")


def test_a_byte_order_mark_from_windows_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Notepad writes one."""
    (tmp_path / "cat.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_recipe(tmp_path / "cat.yaml").name == "cat"


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".hidden", "con", "LPT1.x", "", "a b", "x" * 101, "-x"]
)
def test_a_name_that_is_no_folder_everywhere_is_refused(name: str) -> None:
    """It names the run folder, on Windows as well."""
    assert "name: found" in fault_of(MINIMAL.replace("name: cat", f"name: {name!r}"))


def test_shares_that_leave_nothing_are_refused() -> None:
    """A set without a share takes what others leave."""
    sets = "    - {folder: b, share: 1.0}\n"
    assert "add up to 1 but must leave something" in fault_of(MINIMAL + sets)
    assert parse(MINIMAL + "    - {folder: b, share: 0.25}\n").data.sets[1].share == 0.25


# --- paths and formats ---------------------------------------------------------------------------


def test_relative_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    """Wherever the program is started."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    text = MINIMAL.replace("some/model", "models/mine") + "cache: ../cache\n"
    recipe = parse(text, tmp_path)
    assert recipe.base.source == str(tmp_path / "models" / "mine")
    assert recipe.data.sets[0].folder == tmp_path / "pictures"
    assert recipe.run_folder() == tmp_path / "runs" / "cat"
    assert recipe.cache_folder() == tmp_path / ".." / "cache"


def test_a_hub_id_stays_one_unless_a_folder_of_that_name_lies_beside_the_recipe(
    tmp_path: Path,
) -> None:
    """And what looks like a path is one, there or not."""
    assert resolve_source("some/model", tmp_path) == "some/model"
    assert resolve_source("./model", tmp_path) == str(tmp_path / "model")
    assert resolve_source("x/ae.safetensors", tmp_path) == str(tmp_path / "x" / "ae.safetensors")


def test_a_format_is_a_name_or_a_name_with_options() -> None:
    """Both are the same kind of value, and both survive JSON."""
    text = MINIMAL.replace(
        "source: some/model",
        "source: some/model, format: {name: nf4, group: 32}, "
        "components: {vae: {format: plain}, text_encoder: {}}",
    )
    recipe = parse(text)
    assert recipe.base.format == FormatChoice(name="nf4", options={"group": 32})
    assert recipe.base.component_format("vae", "image") == FormatChoice(name="plain")
    assert recipe.base.component_format("text_encoder", "text") == recipe.base.format
    assert recipe.base.component("unheard_of").source is None
    assert recipe_from_json(recipe.to_json(), origin="recipe.json") == recipe


def test_sizes_are_written_with_units() -> None:
    """Binary and decimal units are told apart."""
    recipe = parse(MINIMAL + "placement: {resident_bytes: 4 GiB}\n")
    assert recipe.placement.resident_bytes == 4 * 2**30


# --- digests -------------------------------------------------------------------------------------


def test_the_digest_does_not_depend_on_how_the_file_is_written() -> None:
    """Order, comments and stated defaults change nothing."""
    other = "# mine\n" + MINIMAL.replace("name: cat\n", "") + "train: {steps: 1000}\nname: cat\n"
    assert parse(other).digest() == parse(MINIMAL).digest()
    assert parse(MINIMAL + "train: {seed: 1}\n").digest() != parse(MINIMAL).digest()


def test_placement_and_length_do_not_change_what_may_be_resumed() -> None:
    """A placement changes no number, and more steps continue the same sequence."""
    plain = parse(MINIMAL).numbers_digest()
    longer = MINIMAL + "train: {steps: 2000}\nplacement: {kind: stream}\ncheckpoints: {every: 10}\n"
    assert parse(longer).numbers_digest() == plain
    assert parse(MINIMAL + "adapter: {rank: 8}\n").numbers_digest() != plain


def test_a_recipe_is_frozen() -> None:
    """What was hashed stays what it was."""
    recipe = parse(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 5  # type: ignore[misc]


# --- what is learned from ------------------------------------------------------------------------


def test_the_keys_of_data_tell_whether_it_is_pictures_or_text() -> None:
    """Nobody has to say so, and paths are relative to the file either way."""
    recipe = parse(TEXT)
    assert recipe.texts.sets[0].path == Path("/recipes/talks.jsonl")
    assert recipe_from_json(recipe.to_json(), origin="x") == recipe
    assert parse(MINIMAL).pictures.sets[0].folder == Path("/recipes/pictures")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "{sets: [{path: a.jsonl}], windw: 5}",
            "line 3: data.windw: unknown key; did you mean 'window'",
        ),
        ("{sets: [{path: a.jsonl, tpye: 1}]}", "line 3: data.sets[0].tpye: unknown key"),
        ("{window: 512}", "data.sets: missing; Files or folders of texts"),
        ("{resolution: 512}", "data.sets: missing; Folders of pictures"),
        ("{sets: [{path: 5}]}", "data.sets[0].path: found 5, must be a path"),
        ("{sets: []}", "data.sets: found an empty list, must have at least 1"),
        (
            "5",
            "data: found 5, must be a mapping with the keys resolution, caption_dropout, held_out, broken, sets",
        ),
        ("{sets: [{path: a.csv}]}", "data.sets[0].path: found 'a.csv': .csv is not read"),
        ("{sets: [{path: a, is_held_out: true}]}", "all sets are held out"),
    ],
)
def test_faults_of_data_are_told_in_terms_of_its_kind(data: str, message: str) -> None:
    """Of the section that knows most of the keys, under the names that are written in the file."""
    head = "name: chat\nbase: {family: llama, variant: tiny, source: some/model}\n"
    assert message in fault_of(f"{head}data: {data}\n")


def test_runs_of_pictures_go_on_where_they_were_left() -> None:
    """The digest is what the last version without text gave: sections that came with it change none."""
    before = "8aab802fab06a772dd254849f5cdce50fce1576f6b8bafa568f9d43254407bad"
    assert parse(MINIMAL).numbers_digest() == before
    changed = parse(MINIMAL + "evaluate: {every: 5}\ncompare: {temperature: 0}\n")
    assert changed.numbers_digest() == before


# --- explaining ----------------------------------------------------------------------------------


def sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    found = {section}
    for info in section.model_fields.values():
        for inner in sections_in(info.annotation):
            found |= sections(inner)
    return found


def test_every_field_has_a_description() -> None:
    """Each is documented once, where it is declared."""
    lacking = [
        f"{section.__name__}.{name}"
        for section in sections(Recipe)
        for name, info in section.model_fields.items()
        if not info.description
    ]
    assert not lacking
    assert len(sections(Recipe)) >= 11


def test_the_explanation_names_every_field_and_is_itself_a_recipe_of_defaults() -> None:
    """Printed from the models, read back by the loader: it cannot drift."""
    text = explain(FILLED)
    whole = explain()
    for section in sections(Recipe) - {FormatChoice}:
        for name in section.model_fields:
            assert f"{name}:" in whole, name
            assert f"{name}:" in text or section in _ABOUT_TEXT, name
    assert parse(text) == parse(MINIMAL)
    assert parse(explain(FILLED_FOR_TEXT)) == parse(TEXT)


# --- the command ---------------------------------------------------------------------------------


def test_recipe_explain_prints_meaning_kind_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """One field as an example of all."""
    assert main(["recipe", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  rank: 16")
    assert lines[at - 2 : at] == [
        "  # Rank of the adapter's matrices.",
        "  # (whole number, at least 1)",
    ]


def test_recipe_new_prints_the_example_or_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either way it is a valid recipe of that family and variant."""
    for wanted in ("flux2.dev", "flux2.tiny"):
        assert main(["recipe", "--new", wanted]) == 0
        (tmp_path / "new.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
        base = load_recipe(tmp_path / "new.yaml").base
        assert f"{base.family}.{base.variant}" == wanted
    assert main(["recipe", "--new", "flux2.dve"]) == 2
    assert "no variant 'dve'; did you mean 'dev'?" in capsys.readouterr().err


def test_names_of_plug_ins_are_checked_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the catalogues, each with the nearest real name."""
    file = tmp_path / "cat.yaml"
    file.write_text(
        "name: cat\n"
        "base: {family: flux2, variant: dve, source: a/b, format: {name: nf4, groupp: 64},\n"
        "  components: {vae: {format: plan}}}\n"
        "data: {sets: [{folder: p}]}\n"
        "train: {optimizer: adam8bit}\n"
        "placement: {kind: steam}\n",
        encoding="utf-8",
    )
    assert main(["recipe", str(file)]) == 2
    message = capsys.readouterr().err
    assert "5 faults" in message
    for nearest in ("dev", "group", "plain", "adamw8bit", "stream"):
        assert f"did you mean {nearest!r}" in message


def test_a_slot_that_the_family_does_not_have_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise its settings would be ignored without a word."""
    text = MINIMAL.replace("source: some/model", "source: a/b, components: {text_encoder_2: {}}")
    (tmp_path / "cat.yaml").write_text(text, encoding="utf-8")
    assert main(["recipe", str(tmp_path / "cat.yaml")]) == 2
    assert "base.components.text_encoder_2: no such part; did you mean 'text_encoder'?" in (
        capsys.readouterr().err
    )


# --- the program ---------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(outsize.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_help_shows_the_exit_codes_and_imports_nothing_heavy() -> None:
    """`--help` must answer at once, on a machine where torch is broken as well."""
    code = (
        "import sys; from outsize.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'numpy', 'pydantic', 'diffusers', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    for line in ("0  completed", "4  the plan needs more memory", "130  interrupted"):
        assert line in done.stdout


def test_the_version_is_printed() -> None:
    """And nothing else."""
    assert run("-m", "outsize", "--version").stdout == f"outsize {outsize.__version__}\n"


def test_a_wrong_command_line_gives_two_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """The same code as a wrong recipe: the person corrects what was written."""
    assert main(["recipe", "--exlain"]) == 2
    assert "--exlain" in capsys.readouterr().err
    assert main(["recipe"]) == 2


def test_errors_of_ours_keep_their_traceback_and_interrupts_give_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect must be seen; Ctrl-C is no defect."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("outsize.recipes.explain.explain", interrupted)
    assert main(["recipe", "--explain"]) == 130
    monkeypatch.setattr("outsize.recipes.explain.explain", broken)
    with pytest.raises(ZeroDivisionError):
        main(["recipe", "--explain"])


def test_a_field_that_came_later_changes_the_digest_only_when_it_is_used() -> None:
    """So that a run can be resumed by a version whose recipes can say more, and by no other numbers."""

    class Inner(Section):
        old: int = 1
        new: Annotated[int, Added()] = 2

    class Outer(Section):
        several: tuple[Inner, ...] = (Inner(),)
        added: Annotated[Inner | None, Added()] = None

    def kept(outer: Outer) -> dict[str, Any]:
        return _without_unused_additions(outer, outer.model_dump(mode="json"))

    assert kept(Outer()) == {"several": [{"old": 1}]}
    assert kept(Outer(several=(Inner(new=3),))) == {"several": [{"old": 1, "new": 3}]}
    assert kept(Outer(added=Inner()))["added"] == {"old": 1}


@pytest.mark.parametrize(
    ("written", "resolution", "resolutions"),
    [
        ("512", 512, (512,)),
        ("[768]", 768, (768,)),
        ("[1024, 512, 768]", (512, 768, 1024), (512, 768, 1024)),
    ],
)
def test_a_resolution_is_one_or_several(
    written: str, resolution: int | tuple[int, ...], resolutions: tuple[int, ...]
) -> None:
    recipe = parse(MINIMAL.replace("data:", f"data:\n  resolution: {written}"))
    assert recipe.pictures.resolution == resolution
    assert recipe.pictures.resolutions == resolutions
    assert recipe.pictures.largest == max(resolutions)
    assert recipe_from_json(recipe.to_json(), origin="x") == recipe


def test_every_new_choice_about_pictures_changes_the_numbers() -> None:
    first = parse(MINIMAL).numbers_digest()
    values = {
        "repeats": "2", "flip": "0.5", "background": "black", "masks": "m", "alpha_as_mask": "true",
        "mask_floor": "0.1", "mask_normalised": "false", "manifest": "a.jsonl", "split": "test",
        "caption_column": "c", "image_column": "i",
    }  # fmt: skip
    digests = {
        parse(
            MINIMAL.replace("folder: pictures", f"folder: pictures\n      {key}: {value}")
        ).numbers_digest()
        for key, value in values.items()
    }
    assert len(digests | {first}) == len(values) + 1
    broken = parse(MINIMAL.replace("data:", "data:\n  broken: leave_out"))
    assert broken.numbers_digest() not in digests | {first}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "resolution: []",
            "data.resolution: found an empty list, must have at least one resolution",
        ),
        (
            "resolution: [512, 8]",
            "data.resolution: found a list, must be from 16 to 8192, each of them",
        ),
        ("resolution: 9000", "data.resolution: found 9000, must be from 16 to 8192"),
        (
            "resolution: [512, 512]",
            "data.resolution: found a list, must not name a resolution twice: ",
        ),
        ("resolution: [512, large]", "data.resolution: found a list, must be a whole number"),
        ("resolution: true", "data.resolution: found true, must be a whole number"),
        ("broken: skip", "data.broken: found 'skip', must be 'error' or 'leave_out'"),
    ],
)
def test_faults_of_picture_data(data: str, message: str) -> None:
    assert message in fault_of(MINIMAL.replace("data:", f"data:\n  {data}"))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("background: pink", "must be white, grey, black or a colour such as '#ff8800'"),
        ("background: '#12345'", "must be white, grey, black or a colour such as '#ff8800'"),
        ("flip: 2", "flip: found 2, must be less than or equal to 1"),
        ("repeats: 0", "repeats: found 0, must be greater than or equal to 1"),
        ("mask_floor: 1", "mask_floor: found 1, must be less than 1"),
        ("masks: m\n      alpha_as_mask: true", "masks and alpha_as_mask exclude each other"),
        ("mask: m", "unknown key; did you mean 'masks'?"),
        ("flips: 0.5", "unknown key; did you mean 'flip'?"),
    ],
)
def test_faults_of_a_set_of_pictures(item: str, message: str) -> None:
    assert message in fault_of(
        MINIMAL.replace("folder: pictures", f"folder: pictures\n      {item}")
    )
