"""Milliseconds of the gated delta rule, forward and with its gradient: upstream's plain torch beside ours.

    python tools/delta_rule.py --device cuda --tokens 2048 8192
    python tools/delta_rule.py --heads 4 8 --width 64 --tokens 2048 --repeats 3 --no-compile

The default shape is that of Qwen3.5-27B: 16 key heads, 48 value heads, 128 wide. Times are medians after two warm-up
calls; on a card they are taken between events in its queue, and the peak is what the allocator held beyond the inputs.
`packed` has eight documents in the row. bfloat16 and float32 are what factors of products are rounded to. A row `compiled` is torch.compile of the whole function, its first call left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from outsize.families._gated_delta import gated_delta_rule

Rule = Callable[..., Tensor]


def upstream(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Upstream's path without flash-linear-attention."""
    out: Tensor = torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )[0]
    return out


def inputs(options: argparse.Namespace, tokens: int) -> list[Tensor]:
    """q, k, v, g, beta as a layer has them."""
    generator = torch.Generator(options.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=options.device)
    keys, values = options.heads
    wide = [draw(1, tokens, heads, options.width) for heads in (keys, keys, values)]
    wide = [one.to(getattr(torch, options.dtype)) for one in wide]
    decay = -torch.nn.functional.softplus(draw(1, tokens, values))
    beta = draw(1, tokens, values).sigmoid().to(wide[0].dtype)
    return [one.requires_grad_() for one in (*wide, decay, beta)]


def once(rule: Rule, given: list[Tensor], *, has_gradient: bool) -> None:
    """One call; its gradient with ones behind it."""
    with torch.set_grad_enabled(has_gradient):
        out = rule(*given)
        if has_gradient:
            torch.autograd.grad(out, given, torch.ones_like(out))


def measure(run: Callable[[], None], device: str, repeats: int) -> tuple[float, float]:
    """Median milliseconds, and the peak in MiB beyond what was there (0 where no allocator tells)."""
    is_card = device.startswith("cuda")
    for _ in range(2):
        run()
    held = 0
    if is_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        if is_card:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - started))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if is_card else 0.0
    return statistics.median(times), peak


def main() -> None:
    """Print one line for each way, length and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 48), metavar=("KEYS", "VALUES"))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-upstream", action="store_true")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, heads {options.heads}, {options.dtype}")
    for tokens in options.tokens:
        documents = torch.arange(tokens, device=options.device).mul(8).div(tokens, rounding_mode="floor")  # fmt: skip
        packed = documents.int().unsqueeze(0)
        ways: dict[str, Rule] = {} if options.no_upstream else {"upstream": upstream}
        for operands in (torch.bfloat16, torch.float32):
            name = str(operands).removeprefix("torch.")
            for chunk in options.chunks:
                ways[f"ours, {name}, chunk {chunk}"] = partial(
                    gated_delta_rule, chunk=chunk, operands=operands
                )
        ways[f"ours, chunk {options.chunks[0]}, packed"] = partial(
            gated_delta_rule, segments=packed, chunk=options.chunks[0]
        )
        given = inputs(options, tokens)
        for name, rule in ways.items():
            torch.compiler.reset()
            both = [(name, rule)]
            if not options.no_compile:
                both.append((f"{name}, compiled", torch.compile(rule, dynamic=False)))
            for label, one in both:
                up, up_peak = measure(
                    partial(once, one, given, has_gradient=False), options.device, options.repeats
                )
                all_, peak = measure(
                    partial(once, one, given, has_gradient=True), options.device, options.repeats
                )
                print(
                    f"T {tokens:6d}  {label:38s} forward {up:9.2f} ms {up_peak:7.0f} MiB"
                    f"   with gradient {all_:9.2f} ms {peak:7.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
