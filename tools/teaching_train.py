"""Training of the teaching base: first the autoencoder, then transformer and text encoder together.

Both loops end at a number of steps or of seconds, whichever comes first, and follow one schedule either way.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from teaching_models import (
    TOKENS_SIDE,
    Parts,
    decode_pictures,
    encode_pictures,
    patchify,
    prompt_states,
    velocity,
)
from teaching_pictures import BACKGROUNDS, Pictures, caption, composite
from teaching_text import encode_prompts
from torch import nn

# Share of samples whose caption is shortened: empty (for guidance), without style, without background.
CAPTION_SHARES = (0.05, 0.04, 0.04)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one loop, and its optimiser settings."""

    steps: int
    seconds: float
    batch: int
    rate: float
    warmup: int
    ema: float


class Clock:
    """Progress from 0 to 1 by steps or seconds, and the learning rate that goes with it."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.started = time.monotonic()
        self.step = 0

    def progress(self) -> float:
        """The larger of the shares of steps and seconds that are spent."""
        spent = (time.monotonic() - self.started) / self.budget.seconds
        return min(1.0, max(self.step / self.budget.steps, spent))

    def rate(self) -> float:
        """Warm-up, then a cosine to 1 % of the full rate."""
        warm = min(1.0, (self.step + 1) / self.budget.warmup)
        return (
            self.budget.rate
            * warm
            * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.progress())))
        )


class Average:
    """Running average of parameters, with a short memory at first."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.live = [p for p in module.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the live parameters."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1 - decay)

    @torch.no_grad()
    def write_back(self) -> None:
        """Replace the live parameters by their average."""
        for live, mean in zip(self.live, self.mean, strict=True):
            live.copy_(mean)


def train_autoencoder(
    parts: Parts, pictures: Pictures, budget: Budget, device: torch.device
) -> dict:
    """Train the autoencoder on the base's pictures, then set its batch-norm statistics.

    Augmentation (any background colour, mirroring, small shifts) makes it fit pictures it has not seen.
    """
    vae = parts.vae.to(device, memory_format=torch.channels_last)
    rgba = torch.from_numpy(pictures.rgba[pictures.indices("base")]).to(device)
    rgba = rgba.permute(0, 3, 1, 2).contiguous()
    optimiser = torch.optim.AdamW(
        vae.parameters(), lr=budget.rate, betas=(0.9, 0.99), weight_decay=1e-3
    )
    average, clock = Average(vae, budget.ema), Clock(budget)
    while clock.progress() < 1.0:
        _set_rate(optimiser, clock.rate())
        pixels = _augmented(rgba, budget.batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _autoencoder_loss(vae, pixels)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        average.update(clock.step)
        if clock.step % 500 == 0:
            print(f"autoencoder {clock.step} {loss.item():.4f}", flush=True)
        clock.step += 1
    average.write_back()
    vae.eval()
    _set_statistics(vae, pictures, device)
    return {"steps": clock.step, "samples": clock.step * budget.batch} | autoencoder_report(
        vae, pictures
    )


def _autoencoder_loss(vae: nn.Module, pixels_BCHW: torch.Tensor) -> torch.Tensor:
    posterior = vae.encode(pixels_BCHW).latent_dist
    mean, logvar = posterior.mean, posterior.logvar
    latent = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
    error = vae.decode(latent).sample - pixels_BCHW
    divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
    # 1e-4 per element: light, about one hundredth of the picture error at the end, yet latents stay near unit size.
    return error.abs().mean() + 2.0 * (error**2).mean() + 1e-4 * divergence


def _augmented(rgba_NCHW: torch.Tensor, batch: int) -> torch.Tensor:
    device = rgba_NCHW.device
    chosen = rgba_NCHW[torch.randint(len(rgba_NCHW), (batch,), device=device)].float() / 255.0
    colours = torch.tensor(list(BACKGROUNDS.values()), device=device).float() / 255.0
    fixed = colours[torch.randint(len(colours), (batch,), device=device)]
    anything = torch.rand(batch, 3, device=device)
    ground = torch.where(torch.rand(batch, 1, device=device) < 0.3, anything, fixed)[
        ..., None, None
    ]
    pixels = chosen[:, :3] * chosen[:, 3:] + ground * (1 - chosen[:, 3:])
    pixels = torch.where(torch.rand(batch, 1, 1, 1, device=device) < 0.25, pixels.flip(3), pixels)
    # One shift for a third of the batch costs one roll, and over many steps covers all shifts.
    down, right = np.random.default_rng(int(torch.randint(2**31, ()).item())).integers(-3, 4, 2)
    third = batch // 3
    pixels = torch.cat([pixels[:third].roll((int(down), int(right)), (2, 3)), pixels[third:]])
    return pixels * 2 - 1


def all_on_backgrounds(
    pictures: Pictures, indices: list[int]
) -> tuple[torch.Tensor, list[tuple[str, str, str]]]:
    """Every picture on every background, (N x 6, 48, 48, 3) uint8, with (name, style, background) of each."""
    rgba = pictures.rgba[indices]
    stacks = [composite(rgba, b) for b in BACKGROUNDS]
    labels = [(pictures.names[i], pictures.styles[i], b) for b in BACKGROUNDS for i in indices]
    return torch.from_numpy(np.concatenate(stacks)), labels


@torch.no_grad()
def _set_statistics(vae: nn.Module, pictures: Pictures, device: torch.device) -> None:
    stack, _ = all_on_backgrounds(pictures, pictures.indices("base"))
    rows = []
    for part in stack.split(512):
        pixels = part.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        rows.append(patchify(vae.encode(pixels).latent_dist.mode()))
    folded = torch.cat(rows)
    vae.bn.running_mean.copy_(folded.mean((0, 2, 3)))
    vae.bn.running_var.copy_(folded.var((0, 2, 3)))


def autoencoder_report(vae: nn.Module, pictures: Pictures) -> dict:
    """Mean PSNR over the base's pictures and over the cats it never saw, on all backgrounds."""
    report = {}
    cats = pictures.indices("cat_train") + pictures.indices("cat_held_out")
    for title, indices in (("psnr_base", pictures.indices("base")), ("psnr_cats", cats)):
        stack, _ = all_on_backgrounds(pictures, indices)
        again = decode_pictures(vae, encode_pictures(vae, stack))
        squared = (again.float() - stack.float()).pow(2).mean((1, 2, 3)) / 255**2
        report[title] = round((-10 * squared.clamp_min(1e-8).log10()).mean().item(), 2)
    return report


def caption_tokens(
    tokenizer: object, labels: list[tuple[str, str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the four captions of each label: whole, empty, without style, without background; (4, N, T)."""
    whole = [caption(*label) for label in labels]
    parts = [c.split(", ") for c in whole]
    kinds = [
        whole,
        [""] * len(whole),
        [f"{p[0]}, {p[2]}" for p in parts],
        [f"{p[0]}, {p[1]}" for p in parts],
    ]
    encoded = [encode_prompts(tokenizer, prompts) for prompts in kinds]
    return torch.stack([e[0] for e in encoded]), torch.stack([e[1] for e in encoded])


def draw_sigma(num: int, device: torch.device) -> torch.Tensor:
    """Noise levels: half logit-normal (the middle, where pictures form), half uniform."""
    middle = torch.randn(num, device=device).sigmoid()
    return torch.where(torch.rand(num, device=device) < 0.5, middle, torch.rand(num, device=device))


class Joint(nn.Module):
    """Text encoder and transformer as one module, so that one backward pass trains both."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.text_encoder = parts.text_encoder.model
        self.transformer = parts.transformer

    def forward(
        self,
        ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        noisy_BSC: torch.Tensor,
        sigma_B: torch.Tensor,
    ) -> torch.Tensor:
        """Velocity for captions given as tokens."""
        return velocity(
            self.transformer, noisy_BSC, prompt_states(self.text_encoder, ids_BT, mask_BT), sigma_B
        )


def train_base(
    parts: Parts, pictures: Pictures, tokenizer: object, budget: Budget, device: torch.device
) -> dict:
    """Train transformer and text encoder on every base picture on every background, by flow matching."""
    stack, labels = all_on_backgrounds(pictures, pictures.indices("base"))
    assert not any("cat" in label[0].split("-") for label in labels)
    clean = encode_pictures(parts.vae, stack)
    ids, mask = (t.to(device) for t in caption_tokens(tokenizer, labels))
    joint = Joint(parts).to(device)
    trained = [p for p in joint.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.02},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(
        groups, lr=budget.rate, betas=(0.9, 0.99), fused=device.type == "cuda"
    )
    average = Average(joint, budget.ema)
    forward = _compiled(joint) if device.type == "cuda" else joint
    clock, losses = Clock(budget), []
    bounds = torch.tensor(CAPTION_SHARES, device=device).cumsum(0)
    while clock.progress() < 1.0:
        _set_rate(optimiser, clock.rate())
        row = torch.randint(len(clean), (budget.batch,), device=device)
        kind = (torch.bucketize(torch.rand(budget.batch, device=device), bounds) + 1) % 4
        sigma = draw_sigma(budget.batch, device)
        target, noisy = noised(clean[row], sigma)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            guess = forward(ids[kind, row], mask[kind, row], noisy, sigma)
        loss = (guess.float() - target).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        average.update(clock.step)
        if clock.step % 250 == 0:
            losses.append(round(loss.item(), 4))
            print(
                f"base {clock.step} {losses[-1]} {time.monotonic() - clock.started:.0f}s",
                flush=True,
            )
        clock.step += 1
    average.write_back()
    return {"steps": clock.step, "samples": clock.step * budget.batch, "losses": losses}


def noised(clean_BSC: torch.Tensor, sigma_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Velocity target and noisy tokens at noise level sigma, on the straight path to noise."""
    noise = torch.randn_like(clean_BSC)
    level = sigma_B[:, None, None]
    return noise - clean_BSC, (1 - level) * clean_BSC + level * noise


def _compiled(joint: Joint) -> nn.Module:
    # Blocks only: one graph of each kind compiles in seconds, the whole model in a minute.
    joint.transformer.compile_repeated_blocks()
    return joint


def _set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def rounded_to_bf16(parts: Parts) -> Parts:
    """The parts as a reader of the bf16 files sees them: rounded, computed in fp32."""
    return Parts(
        *(
            copy.deepcopy(p).to(torch.bfloat16).to(torch.float32)
            for p in (parts.transformer, parts.text_encoder, parts.vae)
        )
    )


assert TOKENS_SIDE * 8 == 48  # noqa: S101, PLR2004  the autoencoder halves twice, patches once
