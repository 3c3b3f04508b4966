"""Recipes, pictures and a tokenizer for a checkpoint that `outsize synth --parts` wrote: what is needed to train at full scale.

    outsize synth flux2.dev@8+48@4 dev --parts --device cuda
    python tools/scale_recipes.py dev flux2 dev@8+48@4 scale --cache cache
    outsize train scale/resident.yaml

Weights are random, so the recipes are for memory, time and equal bytes: nothing can be learned. The tokenizer is a tiny one
of the family's kind (tests/tiny_tokenizers.py); the real one cannot be made up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_tokenizers import TOKENIZERS

# Where the blocks lie, by the recipe's name; "mixed" has all tiers at once.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "resident": {"kind": "resident"},
    "stream": {"kind": "stream"},
    "disk": {"kind": "stream", "pinned_bytes": 0, "pageable_bytes": 0},
    "mixed": {
        "kind": "stream",
        "resident_bytes": "12 GiB",
        "pinned_bytes": "2 GiB",
        "pageable_bytes": "1 GiB",
    },
}


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("family")
    parser.add_argument("variant")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--arithmetic", default="bf16")
    parser.add_argument("--inexact", action="store_true", help="kernels that add in any order")
    parser.add_argument("--suffix", default="", help="end of every recipe's name")
    args = parser.parse_args()
    _write_tokenizers(args.model, args.family, args.variant)
    _write_pictures(args.out / "pictures", args.pictures, args.resolution)
    for name, placement in PLACEMENTS.items():
        recipe = {
            "name": name + args.suffix,
            "base": {"family": args.family, "variant": args.variant, "source": str(args.model)},
            "data": {"resolution": args.resolution, "sets": [{"folder": "pictures"}]},
            "adapter": {"rank": args.rank},
            "train": {
                "steps": args.steps,
                "compile": args.compile,
                "arithmetic": args.arithmetic,
                "exact": not args.inexact,
            },
            "placement": placement,
            "checkpoints": {"every": 10**6},
            "cache": str(args.cache),
        }
        file = args.out / f"{name}{args.suffix}.yaml"
        file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def _write_tokenizers(model: Path, family: str, variant: str) -> None:
    from outsize.families.protocol import FAMILIES

    for component in FAMILIES.load(family).components(variant):
        if component.tokenizer is not None and not (model / component.tokenizer).exists():
            TOKENIZERS[component.family](model / component.tokenizer)


def _write_pictures(folder: Path, count: int, side: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = (37 * number % 256, 91 * number % 256, 151 * number % 256)
        Image.new("RGB", (side, side), colour).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number}", encoding="utf-8")


if __name__ == "__main__":
    main()
