# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, for kinds of attention that the small model does not have.

They use the small model's tokenizer. Their weights are larger than a model's usually begin with, so
that what they answer depends on the prompt.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes import MODEL

WINDOW = 128
"""Tokens that a sliding window spans, the current one included."""

LONG_FROM = 1024
"""Tokens of the longest sequence that `long` rotates by its short factors."""

_COMMON: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 258,
    "initializer_range": 0.1,
}


def _window() -> Any:
    from transformers import MistralConfig

    return MistralConfig(
        **_COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW
    )


def _hybrid() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _latent() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=4,
        first_k_dense_replace=2,  # no experts
        q_lora_rank=None,
        kv_lora_rank=512,  # with 64, the only size of vLLM's CPU kernel
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def _long() -> Any:
    """Rotation by other factors where sequences may be longer than `LONG_FROM` tokens."""
    from transformers import Phi3Config

    return Phi3Config(
        **{**_COMMON, "max_position_embeddings": 4 * LONG_FROM},
        num_hidden_layers=3,
        num_key_value_heads=2,
        original_max_position_embeddings=LONG_FROM,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 2 * i for i in range(16)],
            "original_max_position_embeddings": LONG_FROM,
            "partial_rotary_factor": 1.0,
        },
    )


KINDS: dict[str, Callable[[], Any]] = {
    "window": _window,
    "hybrid": _hybrid,
    "latent": _latent,
    "long": _long,
}


def build(kind: str, folder: Path) -> Path:
    """Write a model of a kind, the same one each time, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS[kind]())
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    return folder
