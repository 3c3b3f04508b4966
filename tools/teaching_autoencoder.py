"""Training of the autoencoder on the base's pictures, and its batch-norm statistics."""

from __future__ import annotations

import numpy as np
import torch
from teaching_loops import Average, Budget, Clock, all_on_backgrounds, set_rate
from teaching_models import Parts, decode_pictures, encode_pictures, patchify
from teaching_pictures import BACKGROUNDS, Pictures
from torch import nn


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
        set_rate(optimiser, clock.rate())
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
