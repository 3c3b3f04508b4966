"""`outsize data check`: the whole of what is trained on, what is odd about it, and a sheet that shows it; plans count the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_support import write_picture
from PIL import Image
from run_support import outsize, site_of, train_here, write_pictures, write_recipe
from safetensors import safe_open
from tiny import write_tiny

from outsize.app.check import check_pictures
from outsize.app.encode import build_corpus
from outsize.app.planning import plan_here
from outsize.app.tasks.protocol import task_of
from outsize.base.errors import SourceError
from outsize.data.found import PictureSet
from outsize.data.samples import samples_of
from outsize.data.scanning import scan
from outsize.data.sheet import shown
from outsize.plan.work import work_of
from outsize.recipes.load import load_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model") / "flux2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A subject of five pictures in three shapes, one torn, one twice; and four others."""
    write_pictures(tmp_path / "pictures", 4, size=(96, 96))
    write_picture(tmp_path / "pictures" / "long.png", (400, 40), seed=3)
    (tmp_path / "pictures" / "long.txt").write_text("sks wall")
    (tmp_path / "pictures" / "twice.png").write_bytes(
        (tmp_path / "pictures" / "00.png").read_bytes()
    )
    (tmp_path / "pictures" / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    write_pictures(tmp_path / "others", 3, size=(40, 40))
    write_pictures(tmp_path / "masks", 1, size=(96, 96))
    return tmp_path


def recipe_of(folder: Path, model: Path, **data: Any) -> Path:
    sets = [
        {"folder": "pictures", "trigger": "sks", "flip": 0.5, "masks": "masks", "repeats": 2},
        {"folder": "others", "is_regularisation": True, "share": 0.25, "loss_weight": 0.5},
    ]
    data = {"sets": sets, "resolution": [48, 64], "broken": "leave_out", **data}
    return write_recipe(folder, model=model, data=data, train={"steps": 40, "batch": 2})


def test_everything_that_is_trained_on_is_listed(folder: Path, model: Path) -> None:
    recipe = recipe_of(folder, model)
    done = outsize("data", "check", recipe, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    subject, others = told["sets"]
    assert (subject["pictures"], subject["left_out"], subject["masks"]) == (6, 1, 1)
    assert (subject["share"], others["share"]) == (0.75, 0.25)
    assert subject["seen"] == 40 * 2 * 0.75 / 6
    assert subject["without_caption"] == 1
    # Two resolutions, mirrored and not; the picture that is there twice is one latent less each.
    assert subject["latents"] == (6 - 1) * 2 * 2
    assert others["latents"] == 3 * 2
    found: Counter[tuple[str, int]] = Counter()
    for one in told["buckets"]:
        found[Path(one["set"]).name, one["resolution"]] += one["pictures"]
        assert one["width"] * one["height"] <= one["resolution"] ** 2
    assert found == {
        (name, side): n for name, n in (("pictures", 6), ("others", 3)) for side in (48, 64)
    }
    first = told["pictures"][0]
    assert first["file"] == str(folder / "pictures" / "00.png")
    assert first["caption"] == "sks, a red picture"
    assert first["mask"] == str(folder / "masks" / "00.png")
    assert first["repeats"] == 2
    assert len(first["buckets"]) == 2
    assert told["left_out"] == [
        f"{folder / 'pictures' / 'torn.jpg'}: not a readable picture (3 bytes): cannot identify its kind"
    ]
    assert told["sheet"] == str(folder / "runs" / "run" / "data" / "contact-sheet.png")
    with Image.open(told["sheet"]) as sheet:
        assert sheet.width > 1000


def test_what_is_odd_is_a_warning_each(folder: Path, model: Path) -> None:
    write_pictures(folder / "tiny", 1, size=(20, 20))
    sets = [{"folder": "pictures", "trigger": "sks"}, {"folder": "tiny"}]
    checked = check_pictures(load_recipe(recipe_of(folder, model, sets=sets)), 0)
    told = "\n".join(checked.notes)
    for expected in (
        "the same picture 2 times",
        "tiny/00.png: smaller than 48 px squared, enlarged by up to 2.4",
        "tiny/00.png: smaller than 64 px squared, enlarged by up to 3.2",
        "pictures/long.png: more than a quarter is cut off",
        "pictures/twice.png: no caption of its own: the trigger or default_caption stands in",
        "pictures/long.png: the caption has fewer than 3 words",
        "1 in the bucket 64 x 64, fewer than the batch of 2",
    ):
        assert expected in told
    assert checked.sheet is None


def test_without_leaving_out_every_broken_file_is_an_error(folder: Path, model: Path) -> None:
    done = outsize("data", "check", recipe_of(folder, model, broken="error"))
    assert done.returncode == SourceError.exit_code
    assert "torn.jpg: not a readable picture" in done.stderr
    assert "left out" not in done.stdout


def test_people_see_tables_warnings_and_where_the_sheet_lies(folder: Path, model: Path) -> None:
    sheet = folder / "deep" / "sheet.png"
    done = outsize("data", "check", recipe_of(folder, model), "--sheet", sheet, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "What is learned from" in done.stdout
    assert "left out: " in done.stdout
    assert "warning: the same picture 2 times" in done.stdout
    assert done.stdout.rstrip().endswith(f"contact sheet: {sheet}")
    assert sheet.is_file()


def test_the_sheet_shows_the_crop_and_greys_what_is_not_learned(tmp_path: Path) -> None:
    pixels = np.zeros((60, 120, 3), dtype=np.uint8)
    pixels[:, :30], pixels[:, 30:60], pixels[:, 60:] = (255, 0, 0), (0, 200, 0), (0, 0, 255)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("three stripes")
    mask = np.zeros((60, 120), dtype=np.uint8)
    mask[:, :60] = 255
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    manifest = scan([PictureSet(folder=tmp_path, masks=tmp_path / "masks")])
    (sample,) = samples_of(manifest, [64], 16)
    out = np.asarray(shown(manifest, sample)).astype(int)
    middle = out.shape[0] // 2
    assert np.abs(out[middle, 2] - (255, 0, 0)).max() < 12
    assert np.abs(out[middle, out.shape[1] * 3 // 8] - (0, 200, 0)).max() < 12
    red, green, blue = out[middle, -2]
    assert red == green == blue > 180


def test_plans_count_what_is_cached_and_training_caches_that(folder: Path, model: Path) -> None:
    """Latents at both resolutions, mirrored ones, masks, embeddings: the bytes of the cache are the plan's."""
    recipe = load_recipe(recipe_of(folder, model))
    with site_of(recipe_of(folder, model)) as (site, _):
        build_corpus(site)
    assert task_of(recipe).count(recipe) == (7, 3)  # by name: the torn one is not known of yet
    demand = work_of(recipe, has_gpu=False, num_samples=(7, 3)).demand
    channels = 16
    by_hand = sum((7 * (2 * channels + 1) + 3 * channels) * (side // 4) ** 2 for side in (48, 64))
    assert demand.cached_elements == by_hand  # type: ignore[attr-defined] # of pictures
    cached = 0
    for path in (folder / "cache" / "conditions").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            cached += sum(
                file.get_tensor(name).numel() for name in {"latent", "mask"} & {*file.keys()}
            )
    # Buckets are smaller than the square; one of ten is torn, one there twice, and two of three masks are missing.
    assert 0.6 * by_hand < cached < by_hand
    (item,) = (one for one in plan_here(recipe, device_kind="cpu").disk if one.owner == "cache")
    assert "10 pictures at 2 resolutions, some mirrored too" in item.why
    one = load_recipe(recipe_of(folder, model, resolution=64))
    (smaller,) = (one for one in plan_here(one, device_kind="cpu").disk if one.owner == "cache")
    assert smaller.num_bytes < item.num_bytes


def test_memory_is_planned_for_the_largest_resolution_and_seconds_for_the_mean(
    folder: Path, model: Path
) -> None:
    def plan(resolution: Any) -> Any:
        return plan_here(
            load_recipe(recipe_of(folder, model, resolution=resolution)), device_kind="cpu"
        )

    several, small, large = plan([64, 256]), plan(64), plan(256)
    peak = [max(one.host_bytes for one in made.phases) for made in (several, small, large)]
    assert peak[0] == peak[2] > peak[1]
    assert several.step.seconds == pytest.approx((small.step.seconds + large.step.seconds) / 2)
    assert any("2 resolutions: memory is for the largest" in note for note in several.notes)


@pytest.mark.slow
def test_what_outsize_sample_made_is_a_set_of_class_pictures(folder: Path, model: Path) -> None:
    """Prior preservation: pictures of the class, drawn by the base before training, with their prompts as captions."""
    before = write_recipe(folder, model=model, name="class", compare={"steps": 1})
    done = outsize(
        "sample", before, "--base", "-p", "a mug on a table", "--seed", "1", "--seed", "2",
        "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sets = [
        {"folder": "pictures", "trigger": "sks"},
        {"folder": "runs/class/samples", "is_regularisation": True, "share": 0.5},
    ]
    recipe = recipe_of(folder, model, sets=sets)
    checked = check_pictures(load_recipe(recipe), 0)
    mine = [one for one in checked.facts["pictures"] if one["set"].endswith("samples")]
    assert [one["caption"] for one in mine] == ["a mug on a table"] * 2
    assert train_here(recipe)[0].outcome == "completed"
