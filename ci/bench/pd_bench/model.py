# SPDX-License-Identifier: Apache-2.0
"""A model for measuring: much KV, little arithmetic, no weights to download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pd_connector.tools.demo import MODEL_DIR

LAYERS = 8
KV_HEADS = 8
HEAD_DIM = 128

KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
"""K and V in bfloat16: 32 KiB."""

MADE_UP_WEIGHTS = ("--load-format", "dummy")
"""vLLM's arguments for a model without weights: the same random weights on every engine."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(folder: Path, *, wide: bool = False) -> Path:
    """Write the config, and the byte model's tokenizer, to this folder, and return it.

    A Llama of 8 layers x 8 KV heads x 128. Its width is small, so that a CPU prefills thousands of tokens in
    seconds. The size of a handoff does not depend on the width.

    Args:
        wide: give the layers the proportions of Llama 3's: hidden states as wide as all heads together, MLPs 3.5 times
            as wide.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(wide), indent=1) + "\n")
    for name in _TOKENIZER:
        shutil.copyfile(MODEL_DIR / name, folder / name)
    return folder


def write_weights(folder: Path) -> None:
    """Write random weights for the folder's config, the same each time: for what engines do only with weights from
    files."""
    random, header, parts, start = np.random.default_rng(1), dict[str, Any](), list[bytes](), 0
    for name, shape in _shapes(json.loads((folder / "config.json").read_text())):
        values = np.ones(shape, np.float32)
        if len(shape) > 1:
            values = random.normal(0.0, 0.05, shape).astype(np.float32)
        data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # bfloat16
        place = [start, start + len(data)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": place}
        parts.append(data)
        start += len(data)
    header_bytes = json.dumps(header).encode()
    header_bytes = header_bytes.ljust(-(-len(header_bytes) // 8) * 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(header_bytes).to_bytes(8, "little") + header_bytes + b"".join(parts))


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all weights."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", [config["vocab_size"], width]
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": [width],
            "mlp.down_proj": [width, inner],
            "mlp.gate_proj": [inner, width],
            "mlp.up_proj": [inner, width],
            "post_attention_layernorm": [width],
            "self_attn.k_proj": [heads, width],
            "self_attn.o_proj": [width, heads],
            "self_attn.q_proj": [heads, width],
            "self_attn.v_proj": [heads, width],
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", [width]


def kv_bytes_per_token(folder: Path) -> int:
    """Bytes of KV per token of this model in a 16-bit cache, over all layers.

    Raises:
        OSError, ValueError, KeyError: the folder has no `config.json` of a plain transformer.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads", heads)
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * 2)


def _config(wide: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
    width = KV_HEADS * HEAD_DIM
    widths = {"hidden_size": width, "intermediate_size": width * 7 // 2} if wide else {}
    return (
        config
        | widths
        | {
            "num_hidden_layers": LAYERS,
            "num_attention_heads": KV_HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        }
    )
