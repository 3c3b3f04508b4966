"""Other programs' files as recipes: every key has its row, every difference its words, and the strict loader takes the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.base.errors import RecipeError
from outsize.cli.main import main
from outsize.plan.names import check_names
from outsize.recipes.importers import (
    _ai_toolkit_job_data as job_data,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_model as job_model,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_network as job_network,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_train as job_train,
)
from outsize.recipes.importers._file import as_yaml, read_values
from outsize.recipes.importers._rows import DEFAULT, leaves
from outsize.recipes.importers.ai_toolkit_job import _worded
from outsize.recipes.importers.protocol import IMPORTERS, Asked, Imported, Row, importer_of
from outsize.recipes.load import parse_recipe
from outsize.recipes.recipe import Recipe

JOB: dict[str, Any] = {
    "job": "extension",
    "config": {
        "name": "my [cat]",
        "process": [
            {
                "type": "diffusion_trainer",
                "training_folder": "output",
                "trigger_word": "sks",
                "device": "cuda",
                "network": {
                    "type": "lora",
                    "linear": 32,
                    "linear_alpha": 16,
                    "conv": 16,
                    "conv_alpha": 16,
                },
                "save": {"dtype": "bf16", "save_every": 250, "max_step_saves_to_keep": 4},
                "datasets": [
                    {
                        "folder_path": "/pictures/cats",
                        "caption_ext": "txt",
                        "caption_dropout_rate": 0.1,
                        "resolution": [512, 768, 1024],
                        "num_repeats": 3,
                    }
                ],
                "train": {
                    "batch_size": 2,
                    "steps": 3000,
                    "lr": 0.0002,
                    "optimizer": "adamw8bit",
                    "optimizer_params": {"weight_decay": 0.0001},
                    "noise_scheduler": "flowmatch",
                    "timestep_type": "weighted",
                },
                "model": {"name_or_path": "black-forest-labs/FLUX.2-dev", "arch": "flux2"},
                "sample": {"prompts": ["[trigger] on a sofa"], "sample_every": 100, "seed": 42},
            }
        ],
    },
    "meta": {"name": "[name]", "version": "1.0"},
}


def job(**changes: Any) -> dict[str, Any]:
    """The job with sections of its process merged over; a list replaces."""
    process = dict(JOB["config"]["process"][0])
    for section, value in changes.items():
        old = process.get(section)
        process[section] = {**old, **value} if isinstance(old, dict) else value
    return {**JOB, "config": {**JOB["config"], "process": [process]}}


def imported(values: dict[str, Any], **asked: Any) -> tuple[Recipe, Imported]:
    """Through the strict loader, from the text that is written."""
    made = importer_of(values, "x").read(values, Asked("file", **asked))
    recipe = parse_recipe(as_yaml(made, file_name="x.yaml"), file="x", folder=Path("/work-folder"))
    check_names(recipe, origin="x")
    return recipe, made


def row_of(made: Imported, where: str) -> Row:
    (row,) = [one for one in made.rows if one.where == where]
    return row


def test_a_whole_job_becomes_the_recipe_that_it_describes() -> None:
    recipe, made = imported(JOB)
    assert recipe.name == "my-cat"
    assert (recipe.base.family, recipe.base.variant) == ("flux2", "dev")
    assert recipe.base.source == "black-forest-labs/FLUX.2-dev"
    assert recipe.base.format.name == "plain", "nothing is quantised unless the job says so"
    assert (recipe.adapter.rank, recipe.adapter.alpha) == (32, None)
    data = recipe.pictures
    assert data.resolution == (512, 768, 1024)
    assert data.caption_dropout == 0.1
    (one,) = data.sets
    assert one.folder == Path("/pictures/cats")
    assert (one.caption_extension, one.repeats, one.trigger) == (".txt", 3, "sks")
    train = recipe.train
    assert (train.steps, train.batch, train.learning_rate) == (3000, 2, 0.0002)
    assert (train.optimizer, train.weight_decay, train.epsilon) == ("adamw8bit", 0.0001, 1e-6)
    assert (train.timesteps.law, train.loss.weighting) == ("uniform", "ai_toolkit")
    assert train.guidance == 1.0, "their default, which is far from the family's"
    assert (recipe.checkpoints.every, recipe.checkpoints.keep) == (250, 4)
    assert recipe.compare.prompts == ("sks on a sofa",)
    assert (recipe.compare.guidance, recipe.compare.steps, recipe.compare.width) == (7.0, 20, 512)
    assert recipe.previews.every == 100
    assert recipe.runs == Path("/work-folder/output")
    assert made.program == "ai-toolkit"


def keys_of(values: dict[str, Any]) -> set[str]:
    """Every key of a job, as its rows are to name it."""
    process = values["config"]["process"][0]
    return {"job", "config.name", "meta", *dict(leaves(process, "", job_model.WHOLE))}


def test_every_key_has_one_row_and_defaults_that_differ_have_theirs() -> None:
    _, made = imported(JOB)
    told = [row.where for row in made.rows]
    assert len(set(told)) == len(told)
    defaults = {one for one in told if one.endswith(DEFAULT)}
    assert set(told) - defaults == keys_of(JOB)
    assert f"train.cfg_scale{DEFAULT}" in defaults
    assert f"network.transformer_only{DEFAULT}" in defaults
    text = as_yaml(made, file_name="x.yaml").replace("\n#     ", " ")
    for row in made.rows:
        assert f"{row.verdict}: {row.where}: " in text
        assert row.how


_KNOWN = sorted(_worded() | job_network.RULES | job_train.RULES | job_model.RULES | job_data.RULES)
_VALUES = st.sampled_from(
    [None, False, True, 0, 1, 2, 0.5, 1.0, "", "x", "yes", "no", [], ["x"], {}]
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_KNOWN) | st.from_regex(r"(train|model)\.[a-z]{3,9}", fullmatch=True),
        _VALUES,
        max_size=12,
    )
)
def test_whatever_a_job_says_each_key_is_told_or_the_value_is_refused_by_name(
    changes: dict[str, Any],
) -> None:
    """No key is passed over and nothing but a RecipeError comes out, whatever people write."""
    process: dict[str, Any] = {
        "datasets": [{"folder_path": "x"}],
        "model": {"name_or_path": "x", "arch": "flux2"},
    }
    for path, value in changes.items():
        *sections, last = path.replace("datasets[].", "datasets.").split(".")
        at: Any = process
        for section in sections:
            at = at[section][0] if section == "datasets" else at.setdefault(section, {})
            if not isinstance(at, dict):
                return
        at[last] = value
    values = {"job": "extension", "config": {"name": "x", "process": [process]}}
    try:
        made = importer_of(values, "x").read(values, Asked("file"))
    except RecipeError as error:
        is_told = any(path.rpartition(".")[2] in str(error) for path in changes)
        if not is_told:
            raise
        return
    told = {row.where for row in made.rows if not row.where.endswith(DEFAULT)}
    assert told == keys_of(values) - {"meta"}


CASES: list[tuple[dict[str, Any], str, str, str, dict[str, Any]]] = [
    # changes, key, verdict, words, what the recipe then says
    ({}, "network.linear_alpha", "changed", "alpha = rank (32) whatever the file says", {"adapter.alpha": None}),
    ({"network": {"linear_alpha": 32}}, "network.linear_alpha", "taken", "alpha is the rank", {"adapter.alpha": None}),
    ({"network": {"pretrained_lora_path": "/a.safetensors"}}, "network.pretrained_lora_path", "taken", "must fit in every key", {"adapter.start": Path("/a.safetensors")}),
    ({"network": {"dropout": 0.1}}, "network.dropout", "left out", "no dropout", {}),
    ({"network": {"type": "lokr"}}, "network.type", "left out", "another kind of adapter", {"adapter.kind": "lora"}),
    ({"network": {"transformer_only": False}}, "network.transformer_only", "changed", "inside the blocks", {}),
    (
        {"train": {"gradient_accumulation_steps": 4}},
        "train.gradient_accumulation_steps", "changed", "only the last of them counts",
        {"train.accumulate": 4, "train.steps": 750, "train.clip_norm": 1.0},
    ),
    ({"train": {"gradient_accumulation_steps": 4}}, "train.steps", "changed", "3000 passes of which 4", {}),
    (
        {"train": {"gradient_accumulation": 4}},
        "train.gradient_accumulation", "changed", "averaged, there summed",
        {"train.accumulate": 4, "train.steps": 3000, "train.clip_norm": 0.25},
    ),
    ({"train": {"gradient_accumulation": 4}}, f"train.max_grad_norm{DEFAULT}", "changed", "rather than a sum", {}),
    ({}, "datasets[0].resolution", "taken", "an epoch is as many times longer", {}),
    ({}, "train.timestep_type", "taken", "table of a thousand weights", {}),
    ({"train": {"timestep_type": "sigmoid"}}, "train.timestep_type", "taken", "logit_normal", {"train.timesteps.law": "logit_normal", "train.loss.weighting": "none"}),
    ({"train": {"timestep_type": "linear"}}, "train.timestep_type", "taken", "uniform", {"train.timesteps.law": "uniform"}),
    ({"train": {"timestep_type": "shift"}}, "train.timestep_type", "changed", "there uniform before", {"train.timesteps.law": "shifted"}),
    ({"train": {"timestep_type": "one_step"}}, "train.timestep_type", "changed", "no law one_step", {}),
    ({"train": {"timestep_type": "linear", "content_or_style": "content"}}, "train.content_or_style", "taken", "law: content", {"train.timesteps.law": "content"}),
    ({"train": {"timestep_type": "sigmoid", "content_or_style": "style"}}, "train.timestep_type", "changed", "over levels rather than", {"train.timesteps.law": "style"}),
    ({"train": {"linear_timesteps2": True}}, "train.linear_timesteps2", "taken", "half_bell", {"train.loss.weighting": "half_bell"}),
    ({"train": {"timestep_type": "linear", "min_denoising_steps": 100, "max_denoising_steps": 900}}, "train.max_denoising_steps", "taken", "a bound", {"train.timesteps.highest": 0.9, "train.timesteps.lowest": 0.1}),
    ({"train": {"unload_text_encoder": True}}, "train.unload_text_encoder", "changed", "replaces every caption by a blank", {}),
    ({"train": {"unload_text_encoder": True, "cache_text_embeddings": True}}, "train.unload_text_encoder", "no effect", "gone before", {}),
    ({"train": {"ema_config": {"use_ema": True, "ema_decay": 0.99}}}, "train.ema_config.use_ema", "changed", "begins anew with every resume", {"train.ema": 0.99}),
    ({"train": {"ema_config": {"use_ema": False}}}, "train.ema_config.use_ema", "no effect", "off", {"train.ema": None}),
    ({"train": {"loss_type": "pseudo_huber"}}, "train.loss_type", "changed", "twice their value", {"train.loss.kind": "smooth_l1", "train.loss.c": 0.01, "train.loss.weighting": "ai_toolkit"}),
    ({"train": {"loss_type": "wavelet"}}, "train.loss_type", "changed", "no loss wavelet", {"train.loss.kind": "mse"}),
    ({"train": {"optimizer": "prodigy", "lr": 1e-4}}, "train.lr", "changed", "below 0.1", {"train.learning_rate": 1.0, "train.optimizer": "prodigy"}),
    ({"train": {"optimizer": "lion8bit"}}, "train.optimizer", "changed", "lion8bit is not among", {"train.optimizer": "adamw"}),
    ({"train": {"lr_scheduler": "cosine"}}, "train.lr_scheduler", "taken", "down to nothing", {"train.schedule": "cosine", "train.schedule_floor": 0.0}),
    ({"train": {"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 20}}}, "train.lr_scheduler", "taken", "20", {"train.warmup_steps": 20}),
    ({"train": {"noise_scheduler": "ddpm"}}, "train.noise_scheduler", "left out", "rectified flow", {}),
    ({"train": {"diff_output_preservation": True}}, "train.diff_output_preservation", "left out", "regularisation sets", {}),
    ({"train": {"bypass_guidance_embedding": True}}, "train.bypass_guidance_embedding", "no effect", "passes over it", {}),
    ({"model": {"arch": "flux", "name_or_path": "black-forest-labs/FLUX.1-dev"}, "train": {"bypass_guidance_embedding": True}}, "train.bypass_guidance_embedding", "left out", "embedding is kept", {"base.family": "flux1"}),
    ({"train": {"learning_rate": 1e-4}}, "train.learning_rate", "left out", "not known here", {}),
    ({"model": {"quantize": True, "qtype": "qfloat8"}}, "model.quantize", "changed", "by other bytes", {"base.format.name": "fp8"}),
    ({"model": {"quantize": True, "qtype": "convrot4"}}, "model.quantize", "changed", "another format of about 4 bits", {"base.format.name": "nf4"}),
    ({"model": {"quantize": True, "qtype": "uint3|ostris/x"}}, "model.qtype", "changed", "adapter behind | is left out", {"base.format.name": "nf4"}),
    ({"model": {"quantize": True, "qtype": "qfloat8", "layer_offloading": True}}, "model.qtype", "changed", "takes float8 in its place", {}),
    ({"model": {"quantize": True, "quantize_te": True}}, "model.quantize_te", "changed", "in model.qtype", {}),
    ({"model": {"layer_offloading": True}}, "model.layer_offloading", "changed", "block by block", {"placement.kind": "stream"}),
    (
        {"model": {"layer_offloading": True, "layer_offloading_transformer_percent": 0.7}},
        "model.layer_offloading_transformer_percent", "changed", "a coin is tossed for every matrix, with 0.7",
        {"placement.kind": "auto"},
    ),
    ({"model": {"vae_path": "org/vae"}}, "model.vae_path", "taken", "vae.source", {"base.components.vae.source": "org/vae"}),
    ({"model": {"accuracy_recovery_adapter": "x"}}, "model.accuracy_recovery_adapter", "left out", "another choice", {}),
    ({"sample": {"prompts": ["a cat --w 512 --seed 3", "a cat"]}}, "sample.prompts", "changed", "flags are left out (seed, w); equal", {"compare.prompts": ("a cat",)}),
    ({"sample": {"samples": [{"prompt": "a dog", "width": 64}], "prompts": []}}, "sample.samples", "changed", "width of single samples", {"compare.prompts": ("a dog",)}),
    ({"train": {"disable_sampling": True}}, "sample.sample_every", "no effect", "no previews", {"previews.every": None}),
    ({"train": {"skip_first_sample": True}}, "train.skip_first_sample", "taken", "at_start", {"previews.at_start": False}),
    ({"training_seed": 7}, "training_seed", "taken", "train.seed", {"train.seed": 7}),
    ({"sample": {"walk_seed": True}}, "sample.walk_seed", "changed", "the same seeds", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where", "verdict", "words", "says"),
    CASES,
    ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)],
)
def test_what_ai_toolkit_means_by_a_key_is_told(
    changes: dict[str, Any], where: str, verdict: str, words: str, says: dict[str, Any]
) -> None:
    recipe, made = imported(job(**changes))
    row = row_of(made, where)
    assert row.verdict == verdict, row
    assert words in row.how, row
    for path, wanted in says.items():
        found: Any = recipe
        for part in path.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert found == wanted, path


def test_sets_of_regularisation_masks_and_flips() -> None:
    sets = [
        {
            "folder_path": "a",
            "flip_x": True,
            "mask_path": "m",
            "mask_min_value": 0.1,
            "resolution": 512,
        },
        {
            "folder_path": "b",
            "is_reg": True,
            "resolution": 768,
            "trigger_word": None,
            "shuffle_tokens": True,
        },
        {
            "folder_path": "c",
            "alpha_mask": True,
            "resolution": 512,
            "control_path": "x",
            "default_caption": "a cat",
        },
    ]
    recipe, made = imported(job(datasets=sets, train={"reg_weight": 0.5}))
    one, two, three = recipe.pictures.sets
    assert (one.flip, one.masks, one.mask_floor) == (0.5, Path("/work-folder/m"), 0.1)
    assert (two.is_regularisation, two.share, two.loss_weight, two.trigger) == (
        True,
        0.5,
        0.5,
        None,
    )
    assert (three.alpha_as_mask, three.default_caption, three.trigger) == (True, "a cat", "sks")
    assert recipe.pictures.resolution == (512, 768)
    assert row_of(made, "datasets[1].resolution").verdict == "changed"
    assert row_of(made, "datasets[1].shuffle_tokens").verdict == "left out"
    assert row_of(made, "datasets[2].control_path").verdict == "left out"
    assert "every other step" in row_of(made, "datasets[1].is_reg").how


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ({"arch": "flux", "name_or_path": "black-forest-labs/FLUX.1-schnell"}, "flux1.schnell"),
        ({"is_flux": True, "name_or_path": "/models/my-own"}, "flux1.dev"),
        (
            {"arch": "flux2_klein_4b:x", "name_or_path": "black-forest-labs/FLUX.2-klein-base-4B"},
            "flux2.klein-base-4b",
        ),
        ({"arch": "flux2_klein_9b", "name_or_path": "x"}, "flux2.klein-9b"),
    ],
)
def test_the_base_is_told_by_architecture_and_name(model: dict[str, Any], base: str) -> None:
    values = job()
    values["config"]["process"][0]["model"] = model
    recipe, _ = imported(values)
    assert f"{recipe.base.family}.{recipe.base.variant}" == base
    has_modulation = "modulation" in recipe.adapter.roles
    assert has_modulation == base.startswith("flux1"), "all linears of that architecture's blocks"


def test_a_base_that_there_is_not_and_jobs_that_train_nothing_are_refused() -> None:
    values = job()
    values["config"]["process"][0]["model"] = {"arch": "wan21", "name_or_path": "x"}
    with pytest.raises(
        RecipeError, match=r"model\.arch 'wan21' is no base that there is here .*--base"
    ):
        imported(values)
    recipe, _ = imported(values, base="flux1.dev", source="org/name")
    assert (recipe.base.family, recipe.base.source) == ("flux1", "org/name")
    with pytest.raises(RecipeError, match="'extract', which trains no adapter"):
        imported(job(type="extract"))
    with pytest.raises(RecipeError, match=r"no importer knows such a file .*ai_toolkit_job"):
        imported({"model": 1})
    with pytest.raises(RecipeError, match=r"train\.lr: found 'fast'"):
        imported(job(train={"lr": "fast"}))


def test_several_processes_and_keys_beside_them_are_told() -> None:
    values = job()
    values = {**values, "extra": 1, "config": {**values["config"], "note": "x"}}
    values["config"]["process"] = values["config"]["process"] * 2
    _, made = imported(values)
    for where in ("extra", "config.note", "config.process[1]"):
        assert row_of(made, where).verdict == "left out"


MUSUBI = """
[general]
resolution = [1024, 768]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
note = "x"

[[datasets]]
image_directory = "/pictures/a"
cache_directory = "/cache/a"
num_repeats = 2

[[datasets]]
image_jsonl_file = "lists/b.jsonl"
resolution = [512, 512]
cache_directory = "/cache/b"
control_directory = "/control"

[[datasets]]
video_directory = "/videos"
target_frames = [1, 25]
"""


def from_toml(text: str, folder: Path, **asked: Any) -> tuple[Recipe, Imported]:
    file = folder / "set.toml"
    file.write_text(text, encoding="utf-8")
    return imported(read_values(file), **asked)


def test_musubis_sets_become_sets_and_everything_else_is_told(tmp_path: Path) -> None:
    recipe, made = from_toml(MUSUBI, tmp_path, base="flux2.klein-4b", source="org/x")
    assert recipe.name == "file"
    assert recipe.pictures.resolution == (512, 887), "sides of squares of the same areas"
    assert recipe.pictures.caption_dropout == 0.0
    one, two = recipe.pictures.sets
    assert (one.folder, one.repeats, one.caption_extension) == (Path("/pictures/a"), 2, ".txt")
    assert (two.folder, two.manifest) == (
        Path("/work-folder/lists"),
        Path("/work-folder/lists/b.jsonl"),
    )
    assert recipe.train.batch == 2
    told = {row.where: row.verdict for row in made.rows}
    assert told["general.resolution"] == "changed"
    assert told["general.note"] == "left out"
    assert told["datasets[0].cache_directory"] == "no effect"
    assert told["datasets[1].control_directory"] == "left out"
    assert told["datasets[2].video_directory"] == told["datasets[2].target_frames"] == "left out"
    assert told["general.batch_size"] == "taken"
    written = {
        "general.resolution",
        "general.caption_extension",
        "general.batch_size",
        "general.enable_bucket",
        "general.note",
    }
    assert written <= set(told)


KOHYA = """
[general]
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
flip_aug = true

[[datasets]]
resolution = 768
batch_size = 4
enable_bucket = true
max_bucket_reso = 1536

  [[datasets.subsets]]
  image_dir = "/pictures/a"
  class_tokens = "sks cat"
  num_repeats = 10
  caption_dropout_rate = 0.1

  [[datasets.subsets]]
  is_reg = true
  image_dir = "/pictures/reg"
  flip_aug = false
  wild = 3
"""


def test_sd_scripts_subsets_become_sets_with_what_stands_above_them(tmp_path: Path) -> None:
    recipe, made = from_toml(KOHYA, tmp_path, base="flux1.dev", source="org/x")
    one, two = recipe.pictures.sets
    assert (one.folder, one.repeats, one.flip) == (Path("/pictures/a"), 10, 0.5)
    assert (one.default_caption, one.caption_extension) == ("sks cat", ".txt")
    assert (two.is_regularisation, two.flip) == (True, 0.0)
    assert recipe.pictures.resolution == 768
    assert recipe.pictures.caption_dropout == 0.1
    assert recipe.train.batch == 4
    told = {row.where: row for row in made.rows}
    assert told["general.shuffle_caption"].verdict == "left out"
    assert told["general.keep_tokens"].verdict == "left out"
    assert told["datasets[0].max_bucket_reso"].verdict == "no effect"
    assert told["datasets[0].subsets[1].wild"].verdict == "left out"
    assert "prior_loss_weight" in told["datasets[0].subsets[1].is_reg"].how
    assert told["general.flip_aug"].verdict == "taken"


def test_the_command_writes_a_recipe_that_loads_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
    assert main(["import", "job.yaml"]) == 0
    out = capsys.readouterr().out
    assert "train.timestep_type" in out
    assert "taken" in out.splitlines()[-1]
    recipe = parse_recipe((tmp_path / "my-cat.yaml").read_text(), file="x", folder=tmp_path)
    assert recipe.adapter.rank == 32
    assert main(["import", "job.yaml"]) == 2
    assert "already there" in capsys.readouterr().err
    (tmp_path / "set.toml").write_text(MUSUBI, encoding="utf-8")
    assert main(["import", "set.toml"]) == 2
    assert "--base FAMILY.VARIANT" in capsys.readouterr().err
    assert main(["import", "set.toml", "--base", "flux2.klein-4b", "--source", "x/y"]) == 0
    (tmp_path / "bad.yaml").write_text("job: 1\njob: 2\n", encoding="utf-8")
    (tmp_path / "bad.toml").write_text("x = = 1", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- 1", encoding="utf-8")
    capsys.readouterr()
    for name, words in (
        ("bad.yaml", "line 2: job: given twice"),
        ("bad.toml", "not readable as TOML"),
        ("list.yaml", "holds no keys"),
        ("none.yaml", "cannot be read"),
    ):
        assert main(["import", name]) == 2
        assert words in capsys.readouterr().err


def test_a_value_that_no_recipe_can_hold_is_told_with_its_place_in_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job(train={"batch_size": 0})), encoding="utf-8")
    assert main(["import", str(file), "--out", str(tmp_path / "out.yaml")]) == 2
    assert "train.batch" in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()


def test_importers_are_read_without_torch() -> None:
    import subprocess
    import sys

    names = ", ".join(repr(one) for one in IMPORTERS.names())
    code = (
        "import sys; from outsize.recipes.importers.protocol import IMPORTERS; import outsize.cli.importing; "
        f"[IMPORTERS.load(name) for name in ({names},)]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
