# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-Next for measuring: delta nets and full attention in turn, no weights to download."""

from __future__ import annotations

import json
from pathlib import Path

from pd_bench.model import write_model

_LAYERS, _KV_HEADS, _HEAD_DIM = 8, 8, 128
_KEY_HEADS, _VALUE_HEADS, _DIM, _WIDTH = 4, 8, 128, 4
_ATTENTION = _LAYERS // 2

TOKEN_BYTES = _ATTENTION * 2 * _KV_HEADS * _HEAD_DIM * 2
"""K and V of a token in bfloat16: 16 KiB."""
STATE_BYTES = (_LAYERS - _ATTENTION) * (
    (_WIDTH - 1) * (2 * _KEY_HEADS + _VALUE_HEADS) * _DIM * 2 + _VALUE_HEADS * _DIM * _DIM * 4
)
"""One state of each delta net: a convolution of Q, K and V in bfloat16, and a matrix for each head in float32."""


def wanted_bytes(tokens: int) -> int:
    """What a decode engine needs of a prompt: KV of all tokens but the last, and the states before it."""
    return (tokens - 1) * TOKEN_BYTES + STATE_BYTES


def write_states_model(folder: Path) -> Path:
    """Write the config, and the byte model's tokenizer, to this folder, and return it. Weights are made up by vLLM
    (`pd_bench.model.MADE_UP_WEIGHTS`)."""
    write_model(folder)
    path = folder / "config.json"
    plain = json.loads(path.read_text())
    kept = {name: plain[name] for name in plain if name.endswith("token_id") or name == "dtype"}
    config = {
        **kept,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": plain["vocab_size"],
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": _LAYERS,
        "layer_types": ["linear_attention", "full_attention"] * _ATTENTION,
        "num_attention_heads": _KV_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "linear_num_key_heads": _KEY_HEADS,
        "linear_num_value_heads": _VALUE_HEADS,
        "linear_key_head_dim": _DIM,
        "linear_value_head_dim": _DIM,
        "linear_conv_kernel_dim": _WIDTH,
        "max_position_embeddings": 8192,
        "mlp_only_layers": list(range(_LAYERS - 1)),  # vLLM wants experts in one layer
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps(config, indent=1) + "\n")
    return folder
