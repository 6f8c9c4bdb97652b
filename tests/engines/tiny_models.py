# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, for kinds of attention that the small model does not have.

They use the small model's tokenizer. Their weights are larger than a model's usually begin with, so
that what they answer depends on the prompt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes import MODEL

WINDOW = 128
"""Tokens that a sliding window spans, the current one included."""

IMAGE, IMAGE_SIDE, IMAGE_TOKENS = "<image>", 64, 64
"""A placeholder as the tokenizer knows it, the side of an image in pixels, and its tokens in a prompt."""

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


def _heads() -> Any:
    """Windows with two KV heads, and full attention with one."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _two_pools() -> Any:
    """Windows and full attention, which SGLang keeps in two pools, as it does for few models."""
    from transformers import MellumConfig

    return MellumConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
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


def _images() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    return LlavaConfig(
        text_config=LlamaConfig(
            **{**_COMMON, "vocab_size": 260},
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=32,
        ),
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=IMAGE_SIDE,
            patch_size=IMAGE_SIDE // 8,
            initializer_factor=5.0,
        ),
        image_token_index=259,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
    )


def _short_conv() -> Any:
    """Short convolutions, whose state is the last two inputs, and full attention."""
    from transformers import Lfm2Config

    return Lfm2Config(
        # vLLM reads no other weights for the logits than those of the embeddings.
        **{**_COMMON, "initializer_range": 0.2, "tie_word_embeddings": True},
        num_hidden_layers=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_dim=128,
        block_dim=128,
        block_multiple_of=64,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    )


def _delta_net() -> Any:
    """Gated delta nets (GDN), with fewer heads of Q and K than of V, and full attention."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,  # what vLLM's CPU kernel takes
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mlp_only_layers=[0, 1, 2],  # vLLM wants experts in one layer
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"] * 2,
    )


def _delta_net_of_experts() -> Any:
    """The same with experts in all layers: SGLang knows no others. Each token takes all of them, because a rounded one
    could take another."""
    config = _delta_net()
    config.mlp_only_layers = []
    config.num_experts_per_tok = config.num_experts
    config.full_attention_interval = 2  # SGLang reads this, and no list of layers
    return config


def _delta_net_of_unlike_dims() -> Any:
    """The same with other dims of Q and K than of V, so that a transposed matrix has another shape. vLLM's own kernel for a
    CPU does not take it."""
    config = _delta_net_of_experts()
    config.linear_key_head_dim = 64
    return config


def _delta_net_in_stages() -> Any:
    """The same with experts in each half of the layers: vLLM wants some in each pipeline stage."""
    config = _delta_net()
    config.mlp_only_layers = [0, 2]
    return config


def _mamba2() -> Any:
    """Mamba2 with two groups of B and C, full attention, and no prefix cache."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        **_COMMON,
        hybrid_override_pattern="M*M*",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
    )


KINDS: dict[str, Callable[[], Any]] = {
    "window": _window,
    "hybrid": _hybrid,
    "heads": _heads,
    "two pools": _two_pools,
    "latent": _latent,
    "long": _long,
    "images": _images,
    "short conv": _short_conv,
    "delta net": _delta_net,
    "delta net of experts": _delta_net_of_experts,
    "delta net of unlike dims": _delta_net_of_unlike_dims,
    "delta net in stages": _delta_net_in_stages,
    "mamba2": _mamba2,
}


def build(kind: str, folder: Path) -> Path:
    """Write a model of a kind, the same one each time, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if kind == "images" else AutoModelForCausalLM
    model = auto.from_config(KINDS[kind]())
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    if kind == "images":
        _with_images(folder)
    if kind == "mamba2":
        _with_pattern(folder)
    return folder


def _with_pattern(folder: Path) -> None:
    """Name the layers and the groups as SGLang reads them. It does not know the names that newer transformers write."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("layers_block_type", "mtp_layers_block_type", "time_step_limit"):
        config.pop(name, None)
    named = {"hybrid_override_pattern": "M*M*", "mamba_n_groups": config["n_groups"]}
    path.write_text(json.dumps({**config, **named}))


def _with_images(folder: Path) -> None:
    """Add what makes pixels of an image, and its placeholder."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    inner = "vision_tower.vision_model."  # as vLLM expects it; newer transformers leave it out
    named = {
        name if inner in name else name.replace("vision_tower.", inner): weight
        for name, weight in weights.items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": IMAGE_SIDE},
            "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": IMAGE_SIDE // 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append(last | {"id": 259, "content": IMAGE})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"split_special_tokens": False})
    )
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '" + IMAGE + "' }}"
        "{% endfor %}{% endfor %}"
    )
