"""Bad recipes, pictures, folders and sources, each with the whole of what is said: the value, the reason, the remedy.

Every row goes through the function of a command, in this process; one of each kind through the program. {F} stands for the folder of the recipe.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from run_support import write_pictures

from outsize.base.errors import OutsizeError, RecipeError, SourceError
from outsize.cli.data import check
from outsize.cli.main import main
from outsize.cli.recipe import recipe as check_recipe
from outsize.recipes.load import load_recipe
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source

GOOD: dict[str, Any] = {
    "name": "run",
    "base": {"family": "flux2", "variant": "tiny", "source": "./model"},
    "data": {"resolution": 64, "sets": [{"folder": "pictures"}]},
    "adapter": {"rank": 4},
    "train": {"steps": 6},
    "cache": "cache",
}

# fmt: off
# what is wrong, the values that are put into the recipe, what is said of it behind the file's name
RECIPES: list[tuple[str, dict[str, Any], str]] = [
    ("a key misspelt", {"train.stepz": 5},
     "line 15: train.stepz: unknown key; did you mean 'steps'?"),
    ("a section misspelt", {"trian": {"steps": 5}},
     "line 15: trian: unknown key; did you mean 'train'?"),
    ("a key of another section", {"train.rank": 8},
     "line 15: train.rank: unknown key; there are accumulate, arithmetic, batch, betas, clip_norm, compile, ema, epsilon, exact, guidance, learning_rate, loss, optimizer, optimizer_options, record, schedule, schedule_floor, seed, steps, timesteps, warmup_steps, weight_decay"),
    ("no steps", {"train.steps": 0},
     "line 14: train.steps: found 0, must be greater than or equal to 1"),
    ("steps as text", {"train.steps": "1000"},
     "line 14: train.steps: found '1000', must be a whole number"),
    ("a name in place of a pseudonym", {"people": {"subjects": ["Ada Lovelace"]}},
     "line 16: people.subjects: 'Ada Lovelace' is no pseudonym: s- and 12 of 0-9 and a-f for a subject, as `outsize registry subject add` makes; names and addresses stay outside this program"),
    ("an address in place of who asks", {"people": {"requester": "ada@example.com"}},
     "line 16: people.requester: found 'ada@example.com': 'ada@example.com' is no pseudonym: s- and 12 of 0-9 and a-f for a subject or p- and 12 of 0-9 and a-f for a party, as `outsize registry subject add` or `outsize registry party add` makes; names and addresses stay outside this program"),
    ("half a step", {"train.steps": 10.5},
     "line 14: train.steps: found 10.5, must be a whole number"),
    ("steps as true", {"train.steps": True},
     "line 14: train.steps: found true, must be a whole number"),
    ("no learning rate", {"train.learning_rate": 0},
     "line 15: train.learning_rate: found 0, must be greater than 0"),
    ("a learning rate below nothing", {"train.learning_rate": -0.0001},
     "line 15: train.learning_rate: found -0.0001, must be greater than 0"),
    ("a learning rate as text", {"train.learning_rate": "0.0001 "},
     "line 15: train.learning_rate: found '0.0001 ', must be a number"),
    ("a learning rate without end", {"train.learning_rate": float("inf")},
     "line 15: train.learning_rate: found inf, must be a finite number"),
    ("no batch", {"train.batch": 0},
     "line 15: train.batch: found 0, must be greater than or equal to 1"),
    ("passes below nothing", {"train.accumulate": -1},
     "line 15: train.accumulate: found -1, must be greater than or equal to 1"),
    ("a schedule that is none", {"train.schedule": "cosin"},
     "line 15: train.schedule: found 'cosin', must be 'constant', 'cosine' or 'linear'; did you mean 'cosine'?"),
    ("a floor above one", {"train.schedule_floor": 1.5},
     "line 15: train.schedule_floor: found 1.5, must be less than or equal to 1"),
    ("an average that never moves", {"train.ema": 1.0},
     "line 15: train.ema: found 1.0, must be less than 1"),
    ("one beta", {"train.betas": [0.9]},
     "line 15: train.betas[1]: missing; a list of 1 is too short"),
    ("a beta of one", {"train.betas": [0.9, 1.0]},
     "line 17: train.betas[1]: found 1.0, must be less than 1"),
    ("an optimizer misspelt", {"train.optimizer": "adamw8bits"},
     "line 15: train.optimizer: no optimizer is called 'adamw8bits'; did you mean 'adamw8bit'?"),
    ("an option that the optimizer lacks", {"train.optimizer_options": {"momentum": 0.9}},
     "line 15: train.optimizer_options: optimizer 'adamw': no option is called 'momentum'; there are: none"),
    ("a seed below nothing", {"train.seed": -1},
     "line 15: train.seed: found -1, must be greater than or equal to 0"),
    ("a clip of nothing", {"train.clip_norm": 0},
     "line 15: train.clip_norm: found 0, must be greater than 0"),
    ("warm-up below nothing", {"train.warmup_steps": -5},
     "line 15: train.warmup_steps: found -5, must be greater than or equal to 0"),
    ("an arithmetic that is none", {"train.arithmetic": "fp9"},
     "line 15: train.arithmetic: no arithmetic is called 'fp9'; did you mean 'fp8'?"),
    ("a law misspelt", {"train.timesteps": {"law": "shited"}},
     "line 16: train.timesteps.law: found 'shited', must be 'shifted', 'uniform', 'logit_normal', 'mode', 'content' or 'style'; did you mean 'shifted'?"),
    ("levels that leave none", {"train.timesteps": {"lowest": 0.8, "highest": 0.2}},
     "line 15: train.timesteps: from lowest 0.8 to highest 0.2 there must be at least 0.001"),
    ("a shift of another law", {"train.timesteps": {"law": "uniform", "shift": 3.0}},
     "line 15: train.timesteps: shift has no meaning for the law uniform; leave it out"),
    ("a loss misspelt", {"train.loss": {"kind": "hubber"}},
     "line 16: train.loss.kind: found 'hubber', must be 'mse', 'mae', 'huber', 'pseudo_huber' or 'smooth_l1'; did you mean 'huber'?"),
    ("no threshold", {"train.loss": {"kind": "huber", "c": 0}},
     "line 17: train.loss.c: found 0, must be greater than 0"),
    ("a weighting of other models", {"train.loss": {"weighting": "min_snr_gamma"}},
     "line 16: train.loss.weighting: found 'min_snr_gamma': min_snr_gamma weighs noise predictions by their signal-to-noise ratio; these bases predict the velocity of a rectified flow, whose error is already scaled alike at every level. Use bell, or draw levels by train.timesteps"),
    ("no rank", {"adapter.rank": 0},
     "line 2: adapter.rank: found 0, must be greater than or equal to 1"),
    ("an alpha of nothing", {"adapter.alpha": 0},
     "line 3: adapter.alpha: found 0, must be greater than 0"),
    ("a role misspelt", {"adapter.roles": ["attentionn"]},
     "line 4: adapter.roles[0]: found 'attentionn', must be 'attention', 'linear_attention', 'mlp', 'modulation', 'embed', 'head', 'norm', 'conv' or 'buffer'; did you mean 'attention'?"),
    ("no role", {"adapter.roles": []},
     "line 3: adapter.roles: found an empty list, must have at least 1 of them"),
    ("a family misspelt", {"base.family": "fluks2"},
     "line 4: base.family: no family is called 'fluks2'; did you mean 'flux2'?"),
    ("a part as a base", {"base.family": "t5_text"},
     "line 4: base.family: 't5_text' is a part of other models and cannot be trained by itself; there are flux1, flux2, gemma4, llama, mistral3, qwen3_5"),
    ("a variant misspelt", {"base.variant": "tinny"},
     "line 6: base.variant: flux2 has no variant 'tinny'; did you mean 'tiny'?"),
    ("a format misspelt", {"base.format": "nf5"},
     "line 7: base.format: no format is called 'nf5'; did you mean 'nf4'?"),
    ("an option that the format lacks", {"base.format": {"name": "nf4", "groups": 64}},
     "line 7: base.format: format 'nf4': no option is called 'groups'; did you mean 'group'? there are: group (64 or 32), scales (fp32, fp16 or double), scale_search (true or false), rotation (none or hadamard)"),
    ("a group that is none", {"base.format": {"name": "nf4", "group": 63}},
     "line 7: base.format: format 'nf4': group is 63 but must be 64 or 32"),
    ("a part that the base lacks", {"base.components": {"vea": {"format": "plain"}}},
     "line 8: base.components.vea: no such part; did you mean 'vae'?"),
    ("no source", {"base.source": None},
     "line 3: base.source: missing; Folder or file on this machine, or hub id, with the weights; nothing is changed there."),
    ("a placement misspelt", {"placement.kind": "streamed"},
     "line 16: placement.kind: no placement is called 'streamed'; did you mean 'stream'?"),
    ("one slot", {"placement.slots": 1},
     "line 16: placement.slots: found 1, must be greater than or equal to 2"),
    ("bytes of no unit", {"placement.resident_bytes": "4 gigs"},
     "line 16: placement.resident_bytes: found '4 gigs': '4 gigs' is not a size; write a number with a unit, as in '24GiB' or '16 GB'"),
    ("a resolution of nothing", {"data.resolution": 8},
     "line 9: data.resolution: found 8, must be from 16 to 8192, each of them"),
    ("a resolution twice", {"data.resolution": [512, 512]},
     "line 9: data.resolution: found a list, must not name a resolution twice: 512"),
    ("resolutions of none", {"data.resolution": []},
     "line 9: data.resolution: found an empty list, must have at least one resolution"),
    ("a resolution as text", {"data.resolution": "1024x1024"},
     "line 9: data.resolution: found '1024x1024', must be a whole number"),
    ("dropout above one", {"data.caption_dropout": 1.5},
     "line 12: data.caption_dropout: found 1.5, must be less than or equal to 1"),
    ("no sets", {"data.sets": []},
     "line 10: data.sets: found an empty list, must have at least 1 of them"),
    ("sets as one", {"data.sets": {"folder": "pictures"}},
     "line 10: data.sets: found a mapping, must be a list"),
    ("a set without a folder", {"data.sets": [{"trigger": "sks"}]},
     "line 11: data.sets[0].folder: missing; Folder of pictures, searched with its sub-folders; or a Hugging Face imagefolder (metadata.jsonl or .csv) or dataset (parquet or arrow)."),
    ("a share of nothing", {"data.sets": [{"folder": "pictures", "share": 0}]},
     "line 12: data.sets[0].share: found 0, must be greater than 0"),
    ("shares above one", {"data.sets": [{"folder": "a", "share": 0.7}, {"folder": "b", "share": 0.6}]},
     "line 8: data: the shares of the sets add up to 1.3 but must add up to 1"),
    ("shares that leave nothing", {"data.sets": [{"folder": "a", "share": 1.0}, {"folder": "b"}]},
     "line 8: data: the shares of the sets add up to 1 but must leave something (< 1) to the sets without one"),
    ("repeats of nothing", {"data.sets": [{"folder": "a", "repeats": 0}]},
     "line 12: data.sets[0].repeats: found 0, must be greater than or equal to 1"),
    ("a colour that is none", {"data.sets": [{"folder": "a", "background": "beige"}]},
     "line 12: data.sets[0].background: found 'beige': must be white, grey, black or a colour such as '#ff8800'"),
    ("masks of two kinds", {"data.sets": [{"folder": "a", "masks": "m", "alpha_as_mask": True}]},
     "line 11: data.sets[0]: masks and alpha_as_mask exclude each other: a set has masks of one kind"),
    ("a share of what is held out", {"data.sets": [{"folder": "a"}, {"folder": "b", "share": 0.5, "is_held_out": True}]},
     "line 12: data.sets[1]: a set that is held out is not drawn from, so it has no share"),
    ("all held out", {"data.sets": [{"folder": "a", "is_held_out": True}]},
     "line 8: data: all sets are held out, so there is nothing to train on"),
    ("text for a base that draws", {"data": {"sets": [{"path": "talks.jsonl"}]}},
     "line 8: data: flux2 learns from pictures, so data has the keys resolution, caption_dropout, held_out, broken, sets; found those of text"),
    ("broken as a word that is none", {"data.broken": "skip"},
     "line 12: data.broken: found 'skip', must be 'error' or 'leave_out'"),
    ("a floor of one", {"data.sets": [{"folder": "a", "mask_floor": 1}]},
     "line 12: data.sets[0].mask_floor: found 1, must be less than 1"),
    ("a name that climbs", {"name": "../run"},
     "line 12: name: found '../run': must name a folder on every system: 1 to 100 letters, digits, '.', '_' or '-', not beginning or ending with '.' or beginning with '-', and no device name such as 'con'"),
    ("a name of a device", {"name": "con"},
     "line 12: name: found 'con': must name a folder on every system: 1 to 100 letters, digits, '.', '_' or '-', not beginning or ending with '.' or beginning with '-', and no device name such as 'con'"),
    ("checkpoints of never", {"checkpoints.every": 0},
     "line 16: checkpoints.every: found 0, must be greater than or equal to 1"),
    ("checkpoints kept of none", {"checkpoints.keep": 0},
     "line 16: checkpoints.keep: found 0, must be greater than or equal to 1"),
    ("prompts as one text", {"compare.prompts": "a cat"},
     "line 16: compare.prompts: found 'a cat', must be a list"),
    ("previews of never", {"previews": {"every": 0}},
     "line 16: previews.every: found 0, must be greater than or equal to 1"),
]

# what is wrong, the whole file, what is said
TEXTS: list[tuple[str, bytes, str]] = [
    ("torn YAML", b"name: run\nbase: [flux2, tiny\n",
     "line 3: not readable as YAML: expected ',' or ']', but got '<stream end>'"),
    ("an empty file", b"",
     "3 faults\n  name: missing; Names the run folder: letters, digits, '.', '_' and '-'.\n  base: missing; The frozen model that is trained on.\n  data: missing; What is learned from."),
    ("a list", b"- name: run\n",
     "line 1: found a list, must be a mapping with the keys name, base, data, adapter, train, placement, checkpoints, evaluate, compare, previews, track, on_stall, people, runs, cache"),
    ("not UTF-8", b"name: \xff\xfe\n",
     "byte 6 is not UTF-8 text"),
    ("a key twice", b"name: run\nname: walk\n",
     "3 faults\n  line 1: base: missing; The frozen model that is trained on.\n  line 1: data: missing; What is learned from.\n  line 2: name: given twice, first in line 1"),
    ("a tag", b"name: !!python/object/apply:os.system [ls]\n",
     "3 faults\n  line 1: name: found a list, must be text\n  line 1: base: missing; The frozen model that is trained on.\n  line 1: data: missing; What is learned from."),
    ("without end", b"name: " + b"[" * 600,
     "nested too deeply to be a recipe"),
]

# what is wrong, files put beside three good pictures, what is taken away, what the set says, what is said of it
FOLDERS: list[tuple[str, dict[str, bytes | str], tuple[str, ...], dict[str, Any], str]] = [
    ("no folder", {}, ("pictures",), {},
     "no such folder of pictures: {F}/pictures; put it there, or correct data.sets in the recipe"),
    ("a file as a folder", {"pictures2": b"x"}, (), {"folder": "pictures2"},
     "no such folder of pictures: {F}/pictures2; put it there, or correct data.sets in the recipe"),
    ("an empty folder", {"empty/notes.md": b"x"}, (), {"folder": "empty"},
     "1 fault in the pictures; nothing was started:\n  {F}/empty: no picture in it (.apng .avif .bmp .gif .heic .heif .jfif .jpeg .jpg .png .tif .tiff .webp)"),
    ("an empty picture", {"pictures/01.png": b""}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.png: the file is empty (0 bytes)"),
    ("a picture cut short", {"pictures/01.png": "cut"}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.png: not a readable picture (68 bytes): image file is truncated"),
    ("text as a picture", {"pictures/01.png": b"no picture"}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.png: not a readable picture (10 bytes): cannot identify its kind"),
    ("a web page as a picture", {"pictures/01.jpg": b"<!DOCTYPE html><html></html>"}, ("pictures/01.png",), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.jpg: not a readable picture (28 bytes): cannot identify its kind"),
    ("a picture in JPEG XL", {"pictures/01.png": b"\xff\n\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.png: a picture in JPEG XL, which is not read; convert it to PNG"),
    ("a picture without a caption", {}, ("pictures/01.txt",), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.png: has no caption beside it; write 01.txt, or set a trigger or default_caption"),
    ("an empty caption", {"pictures/01.txt": b" \n"}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.txt: the caption is empty; write 01.txt, or set a trigger or default_caption"),
    ("a caption not in UTF-8", {"pictures/01.txt": b"caf\xe9"}, (), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.txt: the caption is not UTF-8 text ('utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data); save it as UTF-8"),
    ("a caption of another ending", {}, (), {"caption_extension": ".caption"},
     "3 faults in the pictures; nothing was started:\n  {F}/pictures/00.png: has no caption beside it; write 00.caption, or set a trigger or default_caption\n  {F}/pictures/01.png: has no caption beside it; write 01.caption, or set a trigger or default_caption\n  {F}/pictures/02.png: has no caption beside it; write 02.caption, or set a trigger or default_caption"),
    ("a caption in torn JSON", {"pictures/01.json": b"{"}, ("pictures/01.txt",), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.json: is not JSON: Expecting property name enclosed in double quotes at line 1, character 2"),
    ("a caption in JSON of no key", {"pictures/01.json": b'{"title": "x"}'}, ("pictures/01.txt",), {},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/01.json: holds no caption (caption, text, prompt); write 01.txt, or set a trigger or default_caption"),
    ("no manifest", {}, (), {"manifest": "list.jsonl"},
     "no such manifest: {F}/list.jsonl; put it there, or correct data.sets in the recipe"),
    ("a manifest of another kind", {"list.xlsx": b"x"}, (), {"manifest": "list.xlsx"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.xlsx: a manifest is a .jsonl or .csv file"),
    ("an empty manifest", {"list.jsonl": b""}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.jsonl: lists no picture"),
    ("a torn line", {"list.jsonl": b'{"file_name": "00.png"\n'}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.jsonl: line 1: is not JSON: Expecting ',' delimiter at character 24"),
    ("a line without a file", {"list.jsonl": b'{"caption": "x"}\n'}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.jsonl: line 1: names no picture; give it one of the columns file_name, file, image, path"),
    ("a file that is not there", {"list.jsonl": b'{"file_name": "9.png"}\n'}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/9.png: there is no such file"),
    ("a weight below nothing", {"list.jsonl": b'{"file_name": "00.png", "weight": -1}\n'}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.jsonl: line 1: weight must be a number, above 0, and is -1"),
    ("a weight as text", {"list.csv": b"file_name,weight\n00.png,heavy\n"}, (), {"manifest": "list.csv"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.csv: line 2: weight must be a number, above 0, and is 'heavy'"),
    ("half a repeat", {"list.jsonl": b'{"file_name": "00.png", "repeats": 1.5}\n'}, (), {"manifest": "list.jsonl"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.jsonl: line 1: repeats must be a number, 1 or more, and is 1.5"),
    ("a manifest not in UTF-8", {"list.csv": b"file_name,caption\n00.png,caf\xe9\n"}, (), {"manifest": "list.csv"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.csv: byte 29 is not UTF-8 text"),
    ("a table without the column", {"list.csv": b"name,caption\n00.png,x\n"}, (), {"manifest": "list.csv"},
     "1 fault in the pictures; nothing was started:\n  {F}/list.csv: line 2: names no picture; give it one of the columns file_name, file, image, path"),
    ("no folder of masks", {}, (), {"masks": "masks"},
     "no such folder of masks: {F}/masks; put it there, or correct data.sets in the recipe"),
    ("an empty mask", {"masks/00.png": b""}, (), {"masks": "masks"},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/00.png: its mask {F}/masks/00.png: the file is empty (0 bytes)"),
    ("a mask of another shape", {"masks/00.png": "ribbon"}, (), {"masks": "masks"},
     "1 fault in the pictures; nothing was started:\n  {F}/pictures/00.png: its mask {F}/masks/00.png has 400 x 4 px, which is another shape than the picture's 48 x 48; make it of the same shape"),
]

# what is wrong, the source, its files, what is said
SOURCES: list[tuple[str, str, dict[str, bytes | str], str]] = [
    ("no such path", "./none", {},
     "{F}/none does not exist; name a folder, a safetensors file, or a hub id as owner/name"),
    ("a pickled file", "./m.ckpt", {"m.ckpt": b"\x80\x02."},
     "m.ckpt: a pickled checkpoint runs code of its author when it is opened, so Outsize never opens one; take the repository's safetensors files, or convert it with safetensors' own tools"),
    ("a GGUF file", "./m.gguf", {"m.gguf": b"GGUF"},
     "{F}/m.gguf is quantised as GGUF, which is not read, since it would have to be rounded a second time; take the bf16 files that it was made from, or a copy in bitsandbytes' 4-bit NF4, which is taken as it is"),
    ("a file that is no weights", "./m.txt", {"m.txt": b"x"},
     "{F}/m.txt is no safetensors file; name one, its index, or the folder that holds them"),
    ("an empty folder", "./m", {"m/notes.md": b"x"},
     "{F}/m holds no safetensors file; name the folder or file that holds the weights"),
    ("several checkpoints", "./m", {"m/a.safetensors": b"x", "m/b.safetensors": b"x"},
     "{F}/m holds several checkpoints (a.safetensors, b.safetensors) and no index; name one file"),
    ("a shard that is missing", "./m", {"m/a-00001-of-00002.safetensors": b"x"},
     "{F}/m lacks 1 of 2 shards: a-00002-of-00002.safetensors; download what is missing"),
    ("an index that climbs", "./m", {"m/model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
     "{F}/m/model.safetensors.index.json names ['../x.safetensors']; every path must be a safetensors file inside its folder"),
    ("an index of shards that are missing", "./m", {"m/model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'},
     "{F}/m/model.safetensors.index.json names 1 files, 1 are missing: x.safetensors; download them again, or copy them beside it"),
    ("a pointer of Git LFS", "./m", {"m/model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid"},
     "{F}/m/model.safetensors is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
    ("an empty file", "./m", {"m/model.safetensors": b""},
     "{F}/m/model.safetensors has 0 bytes, too few for a safetensors file; download it again"),
    ("a file of noise", "./m", {"m/model.safetensors": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"},
     "{F}/m/model.safetensors states a header of 18446744073709551615 bytes, more than the 100000000 allowed; it is not a safetensors file, or it is torn: download it again"),
]
# fmt: on

_NO_FOLDER = "no such folder of pictures: {F}/x; put it there, or correct data.sets in the recipe"
# What stands below the faults of pictures.
REMEDY = "\nMend or remove what is named; `data.broken: leave_out` trains without pictures that cannot be read."

# ---------------------------------------------------------------- how a row becomes a message


def _ids(table: Sequence[tuple[Any, ...]]) -> list[str]:
    return [row[0].replace(" ", "-") for row in table]


def changed(folder: Path, changes: Mapping[str, Any]) -> Path:
    """The good recipe with some values, named by their place in it, put in; None takes a key out."""
    whole: dict[str, Any] = yaml.safe_load(yaml.safe_dump(GOOD))
    for place, value in changes.items():
        *sections, key = place.split(".")
        section = whole
        for one in sections:
            section = section.setdefault(one, {})
        if value is None:
            del section[key]
        else:
            section[key] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    return path


def drawn(size: tuple[int, int]) -> bytes:
    """A PNG of one colour."""
    content = io.BytesIO()
    Image.new("RGB", size, "red").save(content, "png")
    return content.getvalue()


def content_of(wanted: bytes | str) -> bytes:
    """Bytes as they are, or by a word."""
    if isinstance(wanted, bytes):
        return wanted
    whole = drawn({"cut": (64, 48), "ribbon": (400, 4), "pixel": (1, 1)}[wanted])
    return whole[: len(whole) // 2] if wanted == "cut" else whole


def lay_out(folder: Path, files: Mapping[str, bytes | str], gone: tuple[str, ...] = ()) -> None:
    """Three good pictures with captions, then what is put beside or over them, and what is taken away."""
    write_pictures(folder / "pictures", 3)
    for name, wanted in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content_of(wanted))
    for name in gone:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def fault(folder: Path, act: Callable[[], object]) -> tuple[int, str]:
    """The code that a command ends with, and its error as a person reads it, with {F} for the folder."""
    with pytest.raises(OutsizeError) as caught:
        act()
    text = str(caught.value).replace(str(folder), "{F}").replace("\\", "/")
    return caught.value.exit_code, text


# ---------------------------------------------------------------- the tests


def test_there_are_many_rows_and_none_twice() -> None:
    """Sixty is what is promised."""
    tables: tuple[Sequence[tuple[Any, ...]], ...] = (RECIPES, TEXTS, FOLDERS, SOURCES)
    assert sum(map(len, tables)) > 100
    for table in tables:
        assert len({row[0] for row in table}) == len(table)


@pytest.mark.parametrize(("changes", "message"), [row[1:] for row in RECIPES], ids=_ids(RECIPES))
def test_a_bad_value_in_a_recipe(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    recipe = changed(tmp_path, changes)
    expected = f"{{F}}/recipe.yaml: {message}"
    assert fault(tmp_path, lambda: check_recipe(recipe)) == (RecipeError.exit_code, expected)


@pytest.mark.parametrize(("content", "message"), [row[1:] for row in TEXTS], ids=_ids(TEXTS))
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(content)
    expected = f"{{F}}/recipe.yaml: {message}"
    assert fault(tmp_path, lambda: check_recipe(recipe)) == (RecipeError.exit_code, expected)


@pytest.mark.parametrize(
    ("files", "gone", "options", "message"), [row[1:] for row in FOLDERS], ids=_ids(FOLDERS)
)
def test_bad_pictures_captions_masks_and_manifests(
    tmp_path: Path,
    files: dict[str, bytes | str],
    gone: tuple[str, ...],
    options: dict[str, Any],
    message: str,
) -> None:
    lay_out(tmp_path, files, gone)
    recipe = changed(tmp_path, {"data.sets": [{"folder": "pictures", **options}]})
    code, text = fault(tmp_path, lambda: check(recipe, pictures=0))
    assert text == message + (REMEDY if "nothing was started" in message else "")
    assert code == SourceError.exit_code


@pytest.mark.parametrize(
    ("source", "files", "message"), [row[1:] for row in SOURCES], ids=_ids(SOURCES)
)
def test_bad_sources(
    tmp_path: Path,
    source: str,
    files: dict[str, bytes | str],
    message: str,
) -> None:
    lay_out(tmp_path, files)
    recipe = changed(tmp_path, {"base.source": source})
    loaded = load_recipe(recipe)

    def read() -> None:
        Source(locate_weights(loaded.base.source, sub_folder="transformer")).close()

    assert fault(tmp_path, read) == (SourceError.exit_code, message)


@pytest.mark.parametrize(
    ("line", "changes", "error", "message"),
    [
        (["recipe"], RECIPES[0][1], RecipeError, "{F}/recipe.yaml: " + RECIPES[0][2]),
        (["data", "check"], {"data.sets": [{"folder": "x"}]}, SourceError, _NO_FOLDER),
        (["prepare"], {"base.source": SOURCES[0][1]}, SourceError, SOURCES[0][3]),
    ],
)
def test_the_program_says_the_same_on_standard_error_and_ends_with_its_code(  # noqa: PLR0917 - as above
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], changes: dict[str, Any],
    error: type[OutsizeError], message: str,
) -> None:  # fmt: skip
    lay_out(tmp_path, {})
    recipe = changed(tmp_path, changes)
    assert main([*line, str(recipe)]) == error.exit_code
    said = capsys.readouterr().err.replace(str(tmp_path), "{F}").replace("\\", "/")
    assert said == f"{error.__name__}: {message}\n"
