"""A program: read a GGUF through transformers and write what it holds as a checkpoint of its own; see gguf_base.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_QUANTISED = "quantization_config"  # what is written is not


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write model.safetensors (fp32), config.json and the tokenizer's files."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A tied head is the token table; `save_pretrained` refuses whatever comes from GGUF.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: one.contiguous() for name, one in model.state_dict().items() if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: one for key, one in model.config.to_dict().items() if key != _QUANTISED}
    config["architectures"] = [type(model).__name__]
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
