"""Fixed choices made from the pictures before any result was seen: prompts, adapter pictures, regularisation pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image
from teaching_pictures import BACKGROUNDS, SIDE_PX, Pictures, caption, composite, is_cat_name

# Subjects an over-trained cat adapter would damage first: other animal faces, and faces with the cats' expressions.
NEAR_CONTROLS = (
    "dog-face",
    "fox",
    "tiger-face",
    "panda",
    "rabbit-face",
    "wolf",
    "crying-face",
    "kissing-face",
    "smiling-face-with-heart-eyes",
    "face-with-tears-of-joy",
)
NUM_FAR_CONTROLS = 10
HELD_OUT_WORDS = {"crying", "kissing", "weary"}  # no regularisation picture has them in its name
# Regularisation pictures nearest to the training cats: the same expressions on faces, and other animals. They make an
# adapter learn the word "cat" rather than a face with a grin. None is a control.
NEAR_OTHERS = (
    "grinning-face",
    "grinning-face-with-smiling-eyes",
    "grinning-face-with-big-eyes",
    "smirking-face",
    "slightly-smiling-face",
    "smiling-face-with-smiling-eyes",
    "angry-face",
    "frowning-face",
    "neutral-face",
    "sleeping-face",
    "mouse-face",
    "pig-face",
    "monkey-face",
    "cow-face",
    "lion",
    "koala",
)
NUM_OTHERS = 96
CAT_PROMPT_BACKGROUNDS = ("white", "blue", "pink")
RULE = (
    "Fixed before any result was seen. Cats: each held-out cat picture (4 expressions x 2 styles) on 3 backgrounds; "
    "neither the base nor the adapter was trained on these pictures. Controls: 10 subjects nearest to cats (animal "
    "faces, and round faces with cat expressions), which an over-trained adapter damages first, and 10 names evenly "
    "spaced in the alphabetical list of all other names, each in both styles on one background in turn; the base knows "
    "them, and they are never among the regularisation pictures."
)


def shared_names(pictures: Pictures) -> list[str]:
    """Names drawn in both styles, cats left out, in alphabetical order."""
    by_style = [
        {n for n, s in zip(pictures.names, pictures.styles, strict=True) if s == style}
        for style in sorted(set(pictures.styles))
    ]
    return sorted(n for n in set.intersection(*by_style) if not is_cat_name(n))


def control_names(pictures: Pictures) -> list[str]:
    """Near controls, then far ones."""
    rest = [n for n in shared_names(pictures) if n not in NEAR_CONTROLS]
    return [*NEAR_CONTROLS, *_evenly_spaced(rest, NUM_FAR_CONTROLS)]


def make_prompts(pictures: Pictures) -> dict:
    """The prompts of the score, as written to prompts.json."""
    cats = [
        _prompt(pictures.names[i], pictures.styles[i], background)
        for i in pictures.indices("cat_held_out")
        for background in CAT_PROMPT_BACKGROUNDS
    ]
    colours = list(BACKGROUNDS)
    asked = [(n, s) for n in control_names(pictures) for s in ("noto", "fluent")]
    controls = [_prompt(n, s, colours[i % len(colours)]) for i, (n, s) in enumerate(asked)]
    return {"rule": RULE, "cats": cats, "controls": controls}


def _prompt(name: str, style: str, background: str) -> dict[str, str]:
    return {
        "prompt": caption(name, style, background),
        "name": name,
        "style": style,
        "background": background,
    }


def adapter_pictures(pictures: Pictures) -> list[tuple[int, str]]:
    """The 16 training cats, each on one background in turn."""
    colours = list(BACKGROUNDS)
    return [(p, colours[i % len(colours)]) for i, p in enumerate(pictures.indices("cat_train"))]


def regularisation_pictures(pictures: Pictures) -> list[tuple[int, str]]:
    """Pictures of subjects the base knows and that are no controls: some near to cats, and some evenly spaced."""
    avoided = {*control_names(pictures), *NEAR_OTHERS}
    avoided |= {n for n in pictures.names if HELD_OUT_WORDS & set(n.split("-"))}
    names = _evenly_spaced([n for n in shared_names(pictures) if n not in avoided], NUM_OTHERS)
    where = {
        (n, s): i for i, (n, s) in enumerate(zip(pictures.names, pictures.styles, strict=True))
    }
    colours = list(BACKGROUNDS)
    styles = ("noto", "fluent")
    # 6 backgrounds and 2 styles: shifting the style by one each turn lets every pair occur.
    far = [
        (where[n, styles[(i + i // len(colours)) % 2]], colours[i % len(colours)])
        for i, n in enumerate(names)
    ]
    pairs = [(n, s) for n in NEAR_OTHERS for s in styles]
    near = [(where[pair], colours[i % len(colours)]) for i, pair in enumerate(pairs)]
    return near + far


def _evenly_spaced(names: list[str], num: int) -> list[str]:
    return [names[round((k + 0.5) * len(names) / num - 0.5)] for k in range(num)]


def write_picture_folders(pictures: Pictures, folder: Path) -> None:
    """Write cats/, held_out/ and others/ as PNG with .txt captions, and the gallery atlas with its names."""
    held = [(i, "white") for i in pictures.indices("cat_held_out")]
    for part, chosen in (
        ("cats", adapter_pictures(pictures)),
        ("held_out", held),
        ("others", regularisation_pictures(pictures)),
    ):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for index, background in chosen:
            name, style = pictures.names[index], pictures.styles[index]
            path = folder / part / f"{name}_{style}_{background}.png"
            Image.fromarray(composite(pictures.rgba[index], background)).save(path, optimize=True)
            path.with_suffix(".txt").write_text(caption(name, style, background) + "\n")
    _write_gallery(pictures, folder)


def _write_gallery(pictures: Pictures, folder: Path) -> None:
    columns = 32
    rows = math.ceil(len(pictures.names) / columns)
    tiles = np.zeros((rows * columns, SIDE_PX, SIDE_PX, 4), np.uint8)
    tiles[: len(pictures.names)] = pictures.rgba
    atlas = tiles.reshape(rows, columns, SIDE_PX, SIDE_PX, 4).swapaxes(1, 2)
    atlas = atlas.reshape(rows * SIDE_PX, columns * SIDE_PX, 4)
    Image.fromarray(atlas).save(folder / "gallery.png", optimize=True)
    table = {
        "tile_px": SIDE_PX,
        "backgrounds": {k: list(v) for k, v in BACKGROUNDS.items()},
        "names": pictures.names,
        "styles": pictures.styles,
    }
    (folder / "gallery.json").write_text(json.dumps(table) + "\n")
