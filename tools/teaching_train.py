"""Training of the transformer, by flow matching on the autoencoder's tokens.

The loop ends at a number of steps or of seconds, whichever comes first, and follows one schedule either way.
"""

from __future__ import annotations

import time

import torch
from teaching_loops import Average, Budget, Clock, all_on_backgrounds, set_rate
from teaching_models import TEXT_LAYERS, Parts, encode_pictures, velocity
from teaching_pictures import Pictures, caption
from teaching_text import encode_prompts
from torch import nn

# Share of samples whose caption is shortened: empty (for guidance), without style, without background.
CAPTION_SHARES = (0.05, 0.04, 0.04)


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


class Strangers:
    """Puts, now and then, a word that no caption holds in the place of one word of a name.

    The base so learns to read the words it knows and to pass over those it does not, and an adapter can teach it one of
    them. No word for a cat is ever put in.
    """

    def __init__(self, tokenizer: object, ids_KNT: torch.Tensor, share: float) -> None:
        table: dict[str, int] = tokenizer.get_vocab()  # type: ignore[attr-defined]
        held = set(ids_KNT.unique().tolist())
        spare = [
            number
            for word, number in sorted(table.items())
            if word.isalpha() and len(word) > 2 and number not in held and not is_cat_word(word)
        ]
        device = ids_KNT.device
        self.words = torch.tensor(spare, device=device)
        # A caption begins with a mark, then the name, then a comma.
        commas = (ids_KNT[0] == table[","]).int()
        self.name_lengths = commas.argmax(1) - 1
        self.share = share

    def put_in(
        self, ids_BT: torch.Tensor, row_B: torch.Tensor, kind_B: torch.Tensor
    ) -> torch.Tensor:
        """Token ids with strangers among them; captions without a name of two words or more stay."""
        num, device = len(ids_BT), ids_BT.device
        lengths = self.name_lengths[row_B]
        chosen = torch.rand(num, device=device) < self.share
        chosen &= (lengths > 1) & (kind_B != 1)
        place = 1 + (torch.rand(num, device=device) * lengths).long()
        words = self.words[torch.randint(len(self.words), (num,), device=device)]
        changed = ids_BT.scatter(1, place[:, None], words[:, None])
        return torch.where(chosen[:, None], changed, ids_BT)


def is_cat_word(word: str) -> bool:
    """Whether a word speaks of cats."""
    return word in {"cat", "cats", "kitty", "kitten", "kittens", "feline", "meow"}


def train_base(
    parts: Parts,
    pictures: Pictures,
    tokenizer: object,
    budget: Budget,
    device: torch.device,
    *,
    strangers_share: float = 0.15,
) -> dict:
    """Train the transformer on every base picture on every background, by flow matching.

    The text encoder passes word vectors through, so its states are looked up.
    """
    stack, labels = all_on_backgrounds(pictures, pictures.indices("base"))
    assert not any("cat" in label[0].split("-") for label in labels)
    clean = encode_pictures(parts.vae, stack)
    ids = caption_tokens(tokenizer, labels)[0].to(device)
    transformer = parts.transformer.to(device)
    vectors = parts.text_encoder.get_input_embeddings().weight.detach().to(device)
    strangers = Strangers(tokenizer, ids, strangers_share)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.02},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(
        groups, lr=budget.rate, betas=(0.9, 0.99), fused=device.type == "cuda"
    )
    average = Average(transformer, budget.ema)
    if device.type == "cuda":
        # Blocks only: one graph of each kind compiles in seconds, the whole model in a minute.
        transformer.compile_repeated_blocks()
    clock, losses = Clock(budget), []
    bounds = torch.tensor(CAPTION_SHARES, device=device).cumsum(0)
    while clock.progress() < 1.0:
        set_rate(optimiser, clock.rate())
        row = torch.randint(len(clean), (budget.batch,), device=device)
        kind = (torch.bucketize(torch.rand(budget.batch, device=device), bounds) + 1) % 4
        sigma = draw_sigma(budget.batch, device)
        target, noisy = noised(clean[row], sigma)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            tokens = strangers.put_in(ids[kind, row], row, kind)
            states = vectors[tokens].repeat(1, 1, len(TEXT_LAYERS))
            guess = velocity(transformer, noisy, states, sigma)
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
