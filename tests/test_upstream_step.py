"""One training step, ours against a plain one written with diffusers and PEFT alone.

The plain step uses nothing of Outsize but the decoded weights and the drawn noise: pipelines' own packing and position
ids, PEFT's own injection by module names, torch's mean square error. Loss and every adapter gradient must agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase, make_tiny, tiny_inputs
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.objectives.protocol import OBJECTIVES

TARGETS = {
    "flux1": r".*transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff.*\.(net\.0\.proj|net\.2)|proj_mlp|proj_out)",
    "flux2": r".*transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj)|ff.*\.linear_(in|out))"
    r"|single_transformer_blocks\.\d+\.attn\.to_out",
}


def _plain_flux2(model: nn.Module, noisy: Tensor, sigma: Tensor, inputs: dict[str, Any]) -> Tensor:
    from diffusers import Flux2Pipeline

    text = inputs["conditions"]["text"]
    out = model(
        hidden_states=Flux2Pipeline._pack_latents(noisy),
        encoder_hidden_states=text,
        timestep=sigma,
        guidance=torch.full_like(sigma, inputs["guidance"]),
        img_ids=Flux2Pipeline._prepare_latent_ids(noisy),
        txt_ids=Flux2Pipeline._prepare_text_ids(text),
        return_dict=False,
    )[0]
    return Flux2Pipeline._unpack_latents_with_ids(out, Flux2Pipeline._prepare_latent_ids(noisy))


def _plain_flux1(model: nn.Module, noisy: Tensor, sigma: Tensor, inputs: dict[str, Any]) -> Tensor:
    from diffusers import FluxPipeline

    batch, channels, height, width = noisy.shape
    conditions = inputs["conditions"]
    out = model(
        hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, height, width),
        encoder_hidden_states=conditions["text"],
        pooled_projections=conditions["pooled"],
        timestep=sigma,
        guidance=torch.full_like(sigma, inputs["guidance"]),
        img_ids=FluxPipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, noisy.device, noisy.dtype
        ),
        txt_ids=torch.zeros(conditions["text"].shape[1], 3),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, height * 8, width * 8, 8)


PLAIN = {"flux1": _plain_flux1, "flux2": _plain_flux2}


def _copy_adapter(ours: Adapter, plain: nn.Module) -> dict[str, Tensor]:
    """Give PEFT's matrices our values; their gradients by our names."""
    found = {}
    for name, parameter in plain.named_parameters():
        if ".lora_" not in name:
            continue
        path, letter = name.replace(".default.weight", "").rsplit(".", 1)
        found[f"{path}.{letter}"] = parameter
    assert found.keys() == ours.parameters().keys(), "both adapt the same modules"
    with torch.no_grad():
        for name, value in ours.parameters().items():
            found[name].copy_(value)
    return found


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_loss_and_gradients_equal_a_plain_diffusers_and_peft_step(
    family: str, tmp_path: Path
) -> None:
    base: TinyBase = make_tiny(tmp_path, family, ("nf4", {}))
    inputs = tiny_inputs(base)
    clean = inputs["noisy_BCHW"]
    objective = OBJECTIVES.load("flow_matching")(law="logit_normal")
    sigma, noise = objective.draw([11, 12], tuple(clean.shape[1:]), 0.0)

    model = base.open("stream")
    adapter = Adapter(
        model.module, base.family.table(base.variant), AdapterShape(4, 8.0, ("attention", "mlp"))
    )
    adapter.materialise_(seed=1, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for name, one in adapter.parameters().items():
            if name.endswith("lora_B"):
                one.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))

    def predict(noisy: Tensor, level: Tensor) -> Tensor:
        return base.family.predict(
            base.variant, model.module, noisy, level, inputs["conditions"], inputs["guidance"]
        )

    model.begin("train")
    loss = objective.loss(predict, clean, sigma, noise, torch.ones(2), torch.float32)
    loss.backward()

    plain = base.upstream()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family])
    inject_adapter_in_model(config, plain)
    theirs = _copy_adapter(adapter, plain)
    level = sigma.view(-1, 1, 1, 1)
    noisy = (1 - level) * clean + level * noise
    expected = torch.nn.functional.mse_loss(
        PLAIN[family](plain, noisy, sigma, inputs), noise - clean
    )
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, one in adapter.parameters().items():
        assert one.grad is not None, name
        wanted = theirs[name].grad
        assert wanted is not None, name
        assert (one.grad - wanted).norm() <= 1e-5 * wanted.norm(), name
