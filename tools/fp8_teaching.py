"""Is a training in 8-bit arithmetic as good? The teaching base, trained in each arithmetic from several seeds.

Every run is `outsize demo`'s own: the packaged recipe with train.arithmetic and train.seed set. Afterwards the adapter is
judged twice, always in the compute type, so that only the training differs: by the demo's scores, and by the loss on the
held-out cats, which no training saw, with the same noise and noise levels for every run.

    python tools/fp8_teaching.py --out teaching --jobs 3        # all, one process for each seed, then the table
    python tools/fp8_teaching.py --out teaching --seeds 0       # one part
    python tools/fp8_teaching.py --out teaching --merge         # the table of the parts that are there

Rule: a figure is no worse within seed noise when its mean over seeds is worse by at most one standard deviation of a single
run, pooled over both. Scores count whole pictures, so their deviation is taken as one picture at least.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, variance
from typing import Any

from outsize import teaching
from outsize.base.files import write_json_atomically
from outsize.base.threads import settle_threads

REFERENCE, TRIED = "bf16", "fp8"
HELD_OUT_SEED = 20_000  # of noise and noise levels; no training's
HELD_OUT_BATCHES = 48  # of all held-out pictures each
LAST_STEPS = 50  # of training, whose mean loss is reported


def main() -> None:
    """Run what is asked for, then merge what is there."""
    asked = _arguments()
    settle_threads()
    started = time.perf_counter()
    if asked.jobs > 1:
        _run_in_parallel(asked)
    elif not asked.merge:
        for seed in asked.seeds:
            for arithmetic in asked.arithmetic:
                _run(asked, seed, arithmetic)
    if asked.jobs > 1 or asked.merge:
        report = merge(asked.out)
        if asked.jobs > 1:
            report["seconds"] = round(time.perf_counter() - started, 1)
        write_json_atomically(asked.out / "teaching.json", report)
        _print(report)


def verdict(
    reference: Sequence[float], tried: Sequence[float], *, is_loss: bool, grain: float = 0.0
) -> dict[str, Any]:
    """Both means, by how much the tried one is worse, and whether that is within seed noise; see the module.

    reference, tried: a figure of each seed, at least two. grain: the least deviation that the figure can show.
    """
    difference = mean(tried) - mean(reference)
    worse_by = difference if is_loss else -difference
    deviation = max(grain, math.sqrt((variance(reference) + variance(tried)) / 2))
    return {
        REFERENCE: mean(reference),
        TRIED: mean(tried),
        "worse_by": worse_by,
        "deviation": deviation,
        "no_worse": worse_by <= deviation,
    }


def merge(out: Path) -> dict[str, Any]:
    """All runs below a folder, side by side."""
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(out.glob("seed-*/result-*.json"))
    ]
    of = {
        name: {run["seed"]: run for run in runs if run["arithmetic"] == name}
        for name in (REFERENCE, TRIED)
    }
    seeds = sorted(of[REFERENCE].keys() & of[TRIED].keys())
    if len(seeds) < 2:
        raise SystemExit(f"{out} holds {len(seeds)} seeds in both; two are needed at least")

    def figures(section: str, key: str) -> list[list[float]]:
        return [[of[name][seed][section][key] for seed in seeds] for name in (REFERENCE, TRIED)]

    num = {
        kind: len(rows)
        for kind, rows in json.loads(teaching.PROMPTS.read_text(encoding="utf-8")).items()
        if isinstance(rows, list)
    }
    judged = {
        "held-out loss": verdict(*figures("held_out", "adapter"), is_loss=True),
        "cats": verdict(*figures("scores", "adapter"), is_loss=False, grain=1 / num["cats"]),
        "others": verdict(
            *figures("scores", "control_after"), is_loss=False, grain=1 / num["controls"]
        ),
    }
    return {
        "what": "the teaching base trained both ways, judged in the compute type",
        "rule": "worse by at most one standard deviation of a single run, pooled over both",
        "seeds": seeds,
        "judged": judged,
        "no_worse": all(one["no_worse"] for one in judged.values()),
        "runs": runs,
    }


def _run(asked: argparse.Namespace, seed: int, arithmetic: str) -> None:
    """One demo and its held-out loss."""
    from outsize.app.demo import run_demo
    from outsize.app.demo_result import to_json
    from outsize.base.progress import Silent
    from outsize.devices.protocol import open_device

    folder = asked.out / f"seed-{seed}"
    device = open_device(asked.device)
    changes: dict[str, Any] = {"arithmetic": arithmetic}
    if asked.steps is not None:
        changes["steps"] = asked.steps
    losses: list[float] = []
    result = run_demo(
        folder,
        device,
        Silent(),
        lambda _, report: losses.append(report.loss),
        seed=seed,
        changes=changes,
    )
    run = Path(result.paths["run"])
    compute = json.loads((run / "plan.json").read_text(encoding="utf-8"))["compute"]
    if compute["arithmetic"] != arithmetic:
        raise SystemExit(f"{run} was trained in {compute['arithmetic']}, not in {arithmetic}")
    started = time.perf_counter()
    held_out = _held_out(run, asked.device)
    done = {
        "arithmetic": arithmetic,
        "seed": seed,
        "device": device.name,
        "compute": compute,
        "scores": to_json(result)["scores"],
        "held_out": held_out,
        "training_loss": mean(losses[-LAST_STEPS:]),
        "steps": len(losses),
        "seconds": result.seconds | {"held out": round(time.perf_counter() - started, 3)},
    }
    write_json_atomically(folder / f"result-{arithmetic}.json", done)
    print(json.dumps(done), flush=True)


def _held_out(run_path: Path, device_kind: str | None) -> dict[str, float]:
    """Loss of the base alone and with the run's adapter on the held-out pictures, in the compute type."""
    import torch

    from outsize.app.attached import adapted, load_adapter_
    from outsize.app.encode import build_corpus
    from outsize.app.losses import Losses
    from outsize.app.planning import plan_here
    from outsize.app.site import open_site
    from outsize.base.progress import Silent
    from outsize.devices.protocol import open_device
    from outsize.recipes.load import recipe_from_json
    from outsize.runs.folder import RunFolder

    run, device = RunFolder(run_path), open_device(device_kind)
    values = json.loads(run.recipe.read_text(encoding="utf-8"))
    num_pictures = len(list(teaching.HELD_OUT.glob("*.png")))
    values["name"] += "-held-out"
    values["data"] |= {"caption_dropout": 0.0, "sets": [{"folder": str(teaching.HELD_OUT)}]}
    values["train"] |= {
        "arithmetic": REFERENCE,
        "compile": False,
        "batch": num_pictures,
        "seed": HELD_OUT_SEED,
    }
    recipe = recipe_from_json(values, origin="held-out")
    plan = plan_here(recipe, device_kind=device.kind)
    judging = RunFolder(recipe.run_folder())
    with open_site(recipe, judging, plan, device, Silent(), offline=True) as site:
        corpus = build_corpus(site)
        with adapted(site) as (model, adapter, _), torch.no_grad():
            load_adapter_(recipe, run, adapter)
            drawn = Losses(recipe, device, model, corpus)

            def loss() -> float:
                losses = []
                for step in range(HELD_OUT_BATCHES):
                    model.begin("forward")
                    losses.append(drawn.loss(step, 0))
                return float(torch.stack(losses).double().mean())

            with_adapter = loss()
            with adapter.disabled():
                return {"base": loss(), "adapter": with_adapter}


def _run_in_parallel(asked: argparse.Namespace) -> None:
    """One process for each seed, so many at a time."""
    asked.out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(asked.seeds), dict[int, subprocess.Popen[bytes]]()
    failed = []
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            seed = waiting.pop(0)
            command = [sys.executable, __file__, "--out", str(asked.out), "--seeds", str(seed)]
            command += ["--arithmetic", *asked.arithmetic]
            for name in ("device", "steps"):
                value = getattr(asked, name)
                command += [] if value is None else [f"--{name}", str(value)]
            with (asked.out / f"seed-{seed}.log").open("wb") as log:
                running[seed] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        time.sleep(0.2)
        for seed, process in list(running.items()):
            if process.poll() is not None:
                del running[seed]
                if process.returncode:
                    failed.append(seed)
    for seed in failed:
        log = (asked.out / f"seed-{seed}.log").read_text(encoding="utf-8", errors="replace")
        print(f"seed {seed} failed:\n{log[-3000:]}", flush=True)
    if failed:
        raise SystemExit(1)


def _print(report: dict[str, Any]) -> None:
    print("arithmetic seed  held-out loss: base  adapter   cats  others   training loss  seconds")
    for run in report["runs"]:
        scores, held_out = run["scores"], run["held_out"]
        print(
            f"{run['arithmetic']:10} {run['seed']:4}        {held_out['base']:13.5f} {held_out['adapter']:8.5f}"
            f"  {scores['adapter']:5.3f}  {scores['control_after']:6.3f}  {run['training_loss']:14.5f}"
            f"  {run['seconds']['total']:7.1f}"
        )
    print(
        f"\n{'mean of ' + str(len(report['seeds'])) + ' seeds':16} {REFERENCE:>9} {TRIED:>9}  worse by  deviation"
    )
    for name, one in report["judged"].items():
        print(
            f"{name:16} {one[REFERENCE]:9.5f} {one[TRIED]:9.5f} {one['worse_by']:9.5f}  {one['deviation']:9.5f}  "
            f"{'no worse within seed noise' if one['no_worse'] else 'WORSE'}"
        )
    print(f"rule: {report['rule']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arithmetic", nargs="+", default=[REFERENCE, TRIED])
    parser.add_argument("--device", default=None, help="cuda, rocm or cpu")
    parser.add_argument(
        "--steps", type=int, default=None, help="fewer than the recipe's, to try it out"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes side by side, one for each seed"
    )
    parser.add_argument("--merge", action="store_true", help="only the table of what is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
