"""The quality gate: does a small adapter over the 4-bit base learn cats and keep everything else?

Several adapters train at once, one per recipe and seed, over one frozen base: the batch holds R groups of samples, and
each adapted layer multiplies group r by adapter r. So a whole table of recipes costs little more than one.

Legend: R adapters, B samples of each, N out features, K in features, J rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from teaching_models import Parts, decode_pictures, encode_pictures, prompt_states, sample, velocity
from teaching_pictures import Pictures, caption, composite
from teaching_sets import adapter_pictures, make_prompts, regularisation_pictures
from teaching_text import encode_prompts
from teaching_train import noised
from torch import nn

from outsize.teaching.score import Gallery, is_cat, recognised

GROUP = 64
RANK = 16
# The 4-bit normal-float levels of QLoRA, arXiv 2305.14314, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to train the cat adapter."""

    rate: float
    share: float  # of the batch that shows regularisation pictures
    batch: int
    steps: int
    seed: int
    noise: str = "uniform"  # or "high": shifted by 3 towards noise, where outlines form
    decay: str = "constant"  # or "cosine"


def nf4_round_trip(weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight as 4-bit normal floats with one fp32 scale for 64 neighbours see it."""
    levels = torch.tensor(NF4, device=weight_NK.device)
    groups = weight_NK.float().view(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-12)
    middles = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(groups / scale, middles)] * scale).view_as(weight_NK)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with R low-rank adapters, one for each group of the batch."""

    def __init__(self, base: nn.Linear, num: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        bound = 1 / math.sqrt(base.in_features)
        self.down_RJK = nn.Parameter(
            torch.empty(num, RANK, base.in_features, device=device).uniform_(-bound, bound)
        )
        self.up_RNJ = nn.Parameter(torch.zeros(num, base.out_features, RANK, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Base output plus each group's own delta (scale 1: alpha equals rank)."""
        groups = x.reshape(len(self.down_RJK), -1, x.shape[-1])
        delta = groups @ self.down_RJK.transpose(1, 2) @ self.up_RNJ.transpose(1, 2)
        return self.base(x) + delta.view(*x.shape[:-1], -1)


def quantise_blocks_(transformer: nn.Module) -> int:
    """Round every linear weight inside the blocks to 4 bits and back; returns how many weights."""
    num = 0
    for linear in _block_linears(transformer).values():
        linear.weight.data = nf4_round_trip(linear.weight.data)
        num += linear.weight.numel()
    return num


def add_adapters_(transformer: nn.Module, num: int) -> list[nn.Parameter]:
    """Wrap every linear layer inside the blocks; returns the adapters' parameters."""
    transformer.requires_grad_(requires_grad=False)
    parameters = []
    for name, linear in _block_linears(transformer).items():
        adapted = AdaptedLinear(linear, num)
        parent, _, leaf = name.rpartition(".")
        setattr(transformer.get_submodule(parent), leaf, adapted)
        parameters += [adapted.down_RJK, adapted.up_RNJ]
    return parameters


def _block_linears(transformer: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name
    }


@dataclass(slots=True)
class Bench:
    """Everything the gate needs besides the transformer, computed once."""

    vae: nn.Module
    gallery: Gallery
    prompts: list[dict]
    num_cats: int
    states: torch.Tensor
    noise: torch.Tensor
    clean: torch.Tensor
    clean_states: torch.Tensor
    num_cat_pictures: int
    empty: torch.Tensor


@torch.no_grad()
def make_bench(
    parts: Parts, pictures: Pictures, tokenizer: object, gallery: Gallery, device: torch.device
) -> Bench:
    """Encode prompts and pictures once; the starting noise of each prompt is fixed by its place in the list."""
    table = make_prompts(pictures)
    prompts = table["cats"] + table["controls"]
    shown = adapter_pictures(pictures) + regularisation_pictures(pictures)
    stack = np.stack([composite(pictures.rgba[i], b) for i, b in shown])
    captions = [caption(pictures.names[i], pictures.styles[i], b) for i, b in shown]
    clean = encode_pictures(parts.vae, torch.from_numpy(stack))
    noise = torch.cat(
        [
            torch.randn(1, *clean.shape[1:], generator=torch.Generator().manual_seed(i))
            for i in range(len(prompts))
        ]
    )
    ask = lambda texts: prompt_states(  # noqa: E731
        parts.text_encoder.model, *(t.to(device) for t in encode_prompts(tokenizer, texts))
    )
    states = ask([p["prompt"] for p in prompts])
    num_cats = len(table["cats"])
    return Bench(
        parts.vae,
        gallery,
        prompts,
        num_cats,
        states,
        noise.to(device),
        clean,
        ask(captions),
        len(adapter_pictures(pictures)),
        ask([""]),
    )


def train_adapters(
    transformer: nn.Module, bench: Bench, recipes: list[Recipe], parameters: list[nn.Parameter]
) -> Iterator[int]:
    """Train all recipes together; yields the number of steps done after every 25."""
    device = bench.clean.device
    batch = recipes[0].batch
    assert all(r.batch == batch for r in recipes)
    sources = [np.random.default_rng(r.seed) for r in recipes]
    optimiser = RowAdam(parameters)
    longest = max(r.steps for r in recipes)
    for step in range(longest):
        rows = np.concatenate(
            [_draw_rows(r, s, bench) for r, s in zip(recipes, sources, strict=True)]
        )
        chosen = torch.from_numpy(rows).to(device)
        sigma = torch.cat(
            [_draw_noise_level(r, s) for r, s in zip(recipes, sources, strict=True)]
        ).to(device)
        target, noisy = noised(bench.clean[chosen], sigma)
        guess = velocity(transformer, noisy, bench.clean_states[chosen], sigma)
        # Summed over adapters, averaged within each: no adapter sees another's gradient.
        loss = (guess - target).pow(2).view(len(recipes), -1).mean(1).sum()
        loss.backward()
        optimiser.step([_rate(r, step) for r in recipes])
        if (step + 1) % 25 == 0:
            yield step + 1


def _draw_rows(recipe: Recipe, source: np.random.Generator, bench: Bench) -> np.ndarray:
    num_others = round(recipe.share * recipe.batch)
    cats = source.integers(bench.num_cat_pictures, size=recipe.batch - num_others)
    others = source.integers(bench.num_cat_pictures, len(bench.clean), size=num_others)
    return np.concatenate([cats, others])


def _draw_noise_level(recipe: Recipe, source: np.random.Generator) -> torch.Tensor:
    # One level in each of B equal parts: same mean, less scatter than independent draws.
    level = (source.permutation(recipe.batch) + source.random(recipe.batch)) / recipe.batch
    if recipe.noise == "high":
        level = 3 * level / (1 + 2 * level)
    return torch.from_numpy(level).float()


def _rate(recipe: Recipe, step: int) -> float:
    warm = min(1.0, (step + 1) / 10)
    if recipe.decay == "cosine":
        return (
            recipe.rate
            * warm
            * max(0.05, 0.5 * (1 + math.cos(math.pi * min(1.0, step / recipe.steps))))
        )
    return recipe.rate * warm


class RowAdam:
    """Adam (0.9, 0.999, no weight decay) with one learning rate, and one gradient clip at norm 1, for each adapter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, rates: list[float]) -> None:
        """One update with rates[r] for adapter r; clears the gradients."""
        self.count += 1
        grads = [p.grad for p in self.parameters]
        norm = sum(g.pow(2).sum((1, 2)) for g in grads).sqrt()
        clip = (1.0 / (norm + 1e-6)).clamp_max(1.0)[:, None, None]
        rate = torch.tensor(rates, device=norm.device)[:, None, None]
        for p, grad, mean, square in zip(
            self.parameters, grads, self.mean, self.square, strict=True
        ):
            g = grad * clip
            mean.lerp_(g, 0.1)
            square.lerp_(g * g, 0.001)
            unbiased = (square / (1 - 0.999**self.count)).sqrt() + 1e-8
            p.sub_(rate * (mean / (1 - 0.9**self.count)) / unbiased)
            p.grad = None


@torch.no_grad()
def draw(
    transformer: nn.Module,
    bench: Bench,
    num: int,
    *,
    steps: int,
    shift: float = 1.0,
    guidance: float = 1.0,
) -> np.ndarray:
    """All prompts drawn by each of num adapters, (R, P, 48, 48, 3) uint8."""
    tokens = sample(
        transformer,
        bench.states.repeat(num, 1, 1),
        bench.noise.repeat(num, 1, 1),
        steps=steps,
        shift=shift,
        guidance=guidance,
        empty_1TD=bench.empty,
    )
    pictures = decode_pictures(bench.vae, tokens)
    return pictures.view(num, len(bench.prompts), *pictures.shape[1:]).numpy()


def score(bench: Bench, pictures_PHWC: np.ndarray) -> dict[str, float]:
    """Shares of cats that are cats, of controls recognised by name, and of controls that turned into cats."""
    matches = [
        bench.gallery.nearest(picture, p["background"])
        for picture, p in zip(pictures_PHWC, bench.prompts, strict=True)
    ]
    right = [recognised(m, p["name"]) for m, p in zip(matches, bench.prompts, strict=True)]
    cats = [is_cat(m) for m in matches]
    near = slice(bench.num_cats, bench.num_cats + 20)
    return {
        "cat": float(np.mean(cats[: bench.num_cats])),
        "cat_right": float(np.mean(right[: bench.num_cats])),
        "control": float(np.mean(right[bench.num_cats :])),
        "control_near": float(np.mean(right[near])),
        "control_cat": float(np.mean(cats[bench.num_cats :])),
    }


def describe(recipe: Recipe) -> dict:
    """A recipe as plain values for the report."""
    return asdict(recipe)
