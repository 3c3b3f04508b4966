"""pebble: a small transformer over image and text tokens in plain torch; a base family dropped in by test_dropin.py.

Dimensions: B batch, C channels, H W latent height and width, N image tokens, T text tokens, D width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec
from outsize.families.protocol import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

WIDTH, HEADS, BLOCKS, CHANNELS = 64, 2, 3, 4
TEXT_TOKENS, TEXT_WIDTH = 64, 64  # as the tiny T5 gives them


def _block(i: int) -> tuple[TensorSpec, ...]:
    at = f"blocks.{i}"
    return (
        TensorSpec(f"{at}.norm_1.weight", (WIDTH,), "norm", i),
        TensorSpec(f"{at}.qkv.weight", (3 * WIDTH, WIDTH), "attention", i, is_linear=True),
        TensorSpec(f"{at}.out.weight", (WIDTH, WIDTH), "attention", i, is_linear=True),
        TensorSpec(f"{at}.norm_2.weight", (WIDTH,), "norm", i),
        TensorSpec(f"{at}.up.weight", (2 * WIDTH, WIDTH), "mlp", i, is_linear=True),
        TensorSpec(f"{at}.up.bias", (2 * WIDTH,), "mlp", i),
        TensorSpec(f"{at}.down.weight", (WIDTH, 2 * WIDTH), "mlp", i, is_linear=True),
    )


TABLE = ShapeTable(
    (
        TensorSpec("image_in.weight", (WIDTH, CHANNELS), "embed", is_linear=True),
        TensorSpec("text_in.weight", (WIDTH, TEXT_WIDTH), "embed", is_linear=True),
        TensorSpec("time_in.weight", (WIDTH, WIDTH), "embed", is_linear=True),
        *(spec for i in range(BLOCKS) for spec in _block(i)),
        TensorSpec("norm.weight", (WIDTH,), "norm"),
        TensorSpec("image_out.weight", (CHANNELS, WIDTH), "head", is_linear=True),
    )
)


@functools.cache
def _classes() -> type[nn.Module]:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.up, self.down = (
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.Linear(2 * WIDTH, WIDTH, bias=False),
            )

        def forward(self, x: Tensor, *, time: Tensor) -> Tensor:
            normed = self.norm_1(x) * (1 + time)
            q, k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in self.qkv(normed).chunk(3, dim=-1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.down(functional.silu(self.up(self.norm_2(x))))

    class Net(nn.Module):
        waves: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.image_in = nn.Linear(CHANNELS, WIDTH, bias=False)
            self.text_in = nn.Linear(TEXT_WIDTH, WIDTH, bias=False)
            self.time_in = nn.Linear(WIDTH, WIDTH, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
            self.image_out = nn.Linear(WIDTH, CHANNELS, bias=False)
            self.register_buffer("waves", _waves(torch.device("meta")), persistent=False)

        def _sines(self, values: Tensor) -> Tensor:
            angles = values.float()[..., None] * self.waves
            return torch.cat([angles.sin(), angles.cos()], dim=-1)

        def forward(self, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
            height, width = noisy.shape[-2:]
            places = torch.arange(height * width, device=noisy.device)
            positions = self._sines(places // width) + self._sines(places % width)
            image = self.image_in(noisy.flatten(2).transpose(1, 2)) + positions.to(noisy.dtype)
            time = self.time_in(self._sines(1000 * sigma).to(noisy.dtype))[:, None]
            x = torch.cat([image, self.text_in(text)], dim=1)
            for block in self.blocks:
                x = block(x, time=time)
            tokens: Tensor = self.image_out(self.norm(x[:, : height * width]))
            return tokens.transpose(1, 2).reshape(noisy.shape)

    return Net


def _waves(device: torch.device) -> Tensor:
    import torch

    half = WIDTH // 2
    return torch.exp(-math.log(10_000) / half * torch.arange(half, device=device).float())


class Pebble:
    """The family."""

    variants = ("tiny",)
    objective = "flow_matching"
    folder = "transformer"

    def table(self, variant: str) -> ShapeTable:  # noqa: ARG002 - one size
        return TABLE

    def layouts(self, variant: str) -> tuple[Layout, ...]:  # noqa: ARG002
        return (Layout("pebble", prefixes=("", "model.")),)

    def block_paths(self, variant: str) -> tuple[str, ...]:  # noqa: ARG002
        return tuple(f"blocks.{i}" for i in range(BLOCKS))

    def build(self, variant: str) -> nn.Module:  # noqa: ARG002
        import torch

        with torch.device("meta"):
            return _classes()().eval().requires_grad_(False)

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        model.waves = _waves(device)

    def components(self, variant: str) -> tuple[Component, ...]:
        return (
            Component("text_encoder", "text", "t5_text", variant, tokenizer="tokenizer"),
            Component("vae", "image", "autoencoder_kl", variant),
        )

    def condition_shapes(self, variant: str) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"text": (TEXT_TOKENS, TEXT_WIDTH)}

    def num_tokens(self, variant: str, latent_shape: tuple[int, int, int]) -> int:  # noqa: ARG002
        return latent_shape[1] * latent_shape[2]

    def predict(  # noqa: PLR0917 - the protocol's order
        self,
        variant: str,  # noqa: ARG002
        model: nn.Module,
        noisy_BCHW: Tensor,
        sigma_B: Tensor,
        conditions: Mapping[str, Tensor],
        guidance: float | None,
    ) -> Tensor:
        assert guidance is None
        velocity: Tensor = model(noisy_BCHW, sigma_B, conditions["text"].to(noisy_BCHW.dtype))
        return velocity

    def training_guidance(self, variant: str) -> float | None:  # noqa: ARG002
        return None

    def sampling_defaults(self, variant: str) -> dict[str, Any]:  # noqa: ARG002
        return {"num_steps": 3, "guidance": None, "is_true_cfg": False}

    def sigmas(self, variant: str, num_steps: int, num_tokens: int) -> list[float]:  # noqa: ARG002
        return [1 - i / num_steps for i in range(num_steps + 1)]

    def shift_mu(self, variant: str, num_tokens: int) -> float:  # noqa: ARG002
        return 0.0


plugin = Pebble()
