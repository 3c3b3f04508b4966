"""Wheels, and a GGUF, as small as they can be: what the text demo fetches and reads, made here."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_tokenizers import write_qwen

from outsize.families.protocol import FAMILIES
from outsize.teaching.wheels import Wheel

_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_wheel(folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0") -> Wheel:
    """A wheel that pip takes, in a folder that may serve as an index; how the demo would pin it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-thing\n"
    )
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, content in files.items():
            archive.writestr(inner, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return Wheel(name, version, path.name, digest, len(content), "things for a test")


def gguf_head(architecture: str) -> bytes:
    """The beginning of a GGUF file, version 3, as far as the name of its architecture."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    counts = (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    kind = (8).to_bytes(4, "little")
    return b"GGUF" + counts + text("general.architecture") + kind + text(architecture)


def write_gguf_reader(path: Path) -> Path:
    """The installed package `gguf` as an archive, which is how the demo has it."""
    spec = importlib.util.find_spec("gguf")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    (info,) = package.parent.glob("gguf-*.dist-info")
    with zipfile.ZipFile(path, "w") as archive:
        for file in (*package.rglob("*.py"), info / "METADATA"):
            archive.write(file, file.relative_to(package.parent).as_posix())
    return path


def write_tiny_gguf(path: Path, *, seed: int = 3) -> dict[str, np.ndarray]:
    """The tiny llama as llama.cpp writes it: matrices in Q4_1, the token table in Q8_0, rows of queries and keys permuted.

    Returns what the codes mean, under the names of transformers, with rows in the order of transformers.
    """
    import gguf

    family: Any = FAMILIES.load("llama")
    row = family.rows["tiny"]
    writer = gguf.GGUFWriter(path, "llama")
    _write_values(writer, row)
    _write_tokenizer(writer, path.parent / "tokenizer-for-gguf", row.vocabulary)
    random = np.random.default_rng(seed)
    meant = {}
    for spec in family.table("tiny"):
        values = (random.standard_normal(spec.shape) * 0.08).astype(np.float32)
        name, kind = _named(spec.name), gguf.GGMLQuantizationType.F32
        if spec.role == "norm":
            values = 1 + values
        else:
            kind = (
                gguf.GGMLQuantizationType.Q8_0
                if "embed" in spec.name
                else gguf.GGMLQuantizationType.Q4_1
            )
        heads = {"q_proj": row.num_heads, "k_proj": row.num_kv_heads}.get(spec.name.split(".")[-2])
        codes = gguf.quantize(values, kind)
        meant[spec.name] = gguf.dequantize(codes, kind).reshape(spec.shape)
        if heads is not None:  # whole rows move, so that their codes do
            order = np.arange(spec.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            codes = codes[order]
        writer.add_tensor(name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _write_values(writer: Any, row: Any) -> None:
    writer.add_block_count(row.num_layers)
    writer.add_context_length(row.max_positions)
    writer.add_embedding_length(row.width)
    writer.add_feed_forward_length(row.inner)
    writer.add_head_count(row.num_heads)
    writer.add_head_count_kv(row.num_kv_heads)
    writer.add_rope_freq_base(row.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(row.vocabulary)


def _write_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    write_qwen(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = dict(model["model"]["vocab"]) | {
        one["content"]: one["id"] for one in model["added_tokens"]
    }
    words = sorted(tokens, key=lambda word: tokens[word])
    words += [f"<unused{number}>" for number in range(len(words), vocabulary)]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["model"]["merges"]]
    special = {one["content"] for one in model["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types(
        [3 if word in special or word.startswith("<unused") else 1 for word in words]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens["<|im_end|>"])
    writer.add_add_bos_token(value=False)


def _named(name: str) -> str:
    path, _, kind = name.rpartition(".")
    if path == "model.embed_tokens":
        return f"token_embd.{kind}"
    if path == "model.norm":
        return f"output_norm.{kind}"
    _, _, number, rest = path.split(".", 3)
    return f"blk.{number}.{_GGUF_NAMES[rest]}.{kind}"


def upstream_perplexity(model: Any, ids: list[int], window: int) -> float:
    """By transformers alone: a text cut into windows, which begin with the token that the one before ended with."""
    total, count = 0.0, 0
    for begin in range(0, len(ids), window - 1):
        piece = torch.tensor([ids[begin : begin + window]])
        if piece.shape[1] > 1:
            with torch.no_grad():
                logits = model(piece).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            count += piece.shape[1] - 1
    return float(np.exp(total / count))
