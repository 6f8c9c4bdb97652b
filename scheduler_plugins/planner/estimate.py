# SPDX-License-Identifier: Apache-2.0
"""An engine's profile from a model's config and a device's data sheet. No engine was run: it is called `estimated`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.planner.devices import Sheet
from scheduler_plugins.planner.errors import PlanError

OF_FLOPS, OF_BANDWIDTH, OF_MEMORY = 0.5, 0.8, 0.9
"""Parts of the data sheet's figures that engines reach: assumed, not measured."""
OF_TP = {1: 1.0, 2: 0.95, 4: 0.88, 8: 0.78}
"""Part of the GPUs' speed that is left at a tensor parallelism: assumed, not measured."""
STEP_S = 2e-3
"""Fixed time of a step beside its work: scheduler, launches."""
ACTIVATIONS_BYTES = 2e9
"""Memory of each GPU that neither weights nor KV can have."""
LOAD_BYTES_PER_S, BOOT_S = 2e9, 40.0
"""Weights are read at this rate, and everything else of a start takes this time."""
CHUNK_TOKENS = 2048
MOST_BYTES = 16 << 20
"""A longer config is cut, and is not JSON then."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "float8_e4m3fn": 1}
_STRANGE = ("mamba", "ssm", "linear_attn", "recurrent", "conv")
"""Kinds of layers whose state is not KV that grows with the tokens."""


class Model(NamedTuple):
    """What a config says of a model's size."""

    name: str
    dtype: str
    layers: int
    parameters: float  # all
    active: float  # used for a token
    pair_flops: float  # of attention, for a pair of tokens, all layers
    kv_bytes_per_token: float
    context: int  # longest; 0: the config does not say
    weight_bytes: float
    kv_value_bytes: float = 2.0  # of one value of KV, unless the engine is told another dtype


def read_model(path: Path) -> Model:
    """Read a `config.json` in Hugging Face's form.

    Raises:
        PlanError: it cannot be read, lacks a size, or has layers without KV.
    """
    path = path / "config.json" if os.path.isdir(path) else path
    try:
        with path.open("rb") as file:
            config = msgspec.json.decode(file.read(MOST_BYTES))
    except OSError as error:
        raise PlanError(
            f"model {path}: cannot be read ({error.strerror}); name a config.json or its folder"
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"model {path}: is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise PlanError(f"model {path}: must be an object, as config.json is")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    types = config.get("layer_types") or ()
    if not isinstance(types, list | tuple):
        raise PlanError(f"model {path}: layer_types is {types!r}; must be a list")
    kinds = {str(kind) for kind in types}
    if strange := sorted(kind for kind in kinds if any(word in kind for word in _STRANGE)):
        raise PlanError(
            f"model {path}: has layers of kind {', '.join(strange)}, which are not estimated; measure it with "
            "`pd-connector profile` and name the profile in the inventory"
        )
    return _sized(config, path)


def _sized(config: dict[str, Any], path: Path) -> Model:
    def size(*names: str, default: float | None = None) -> float:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
            raise PlanError(
                f"model {path}: {names[0]} is {value!r}; must be a number, as in the model's own config.json"
            )
        return float(value)

    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads = size("num_attention_heads", "n_head")
    kv_heads = size("num_key_value_heads", default=heads)
    if min(hidden, layers, heads, kv_heads) < 1:
        raise PlanError(
            f"model {path}: hidden_size, num_hidden_layers, num_attention_heads and num_key_value_heads must be 1 or more"
        )
    dim = size("head_dim", default=hidden / heads)
    experts = size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    chosen = size("num_experts_per_tok", default=0)
    width = size("intermediate_size", "n_inner", default=4 * hidden)
    each = 3 * hidden * size("moe_intermediate_size", default=width)
    mlp, used = (each * experts, each * (chosen or 1)) if experts else (3 * hidden * width,) * 2
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    latent = size("kv_lora_rank", default=0)
    vocabulary = size("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in BYTES:
        raise PlanError(f"model {path}: dtype {dtype!r} is not known; known are {', '.join(BYTES)}")
    kv_values = latent + size("qk_rope_head_dim", default=0) if latent else 2 * kv_heads * dim
    if not kv_values:
        raise PlanError(f"model {path}: has no KV (head_dim or kv_lora_rank is 0)")
    name = str(config.get("_name_or_path") or path.parent.name or "model")
    if not name.isprintable():
        raise PlanError(
            f"model {path}: its name {name!r} becomes part of commands; wanted is one line"
        )
    quantised = config.get("quantization_config")
    parameters = layers * (attention + mlp) + vocabulary
    return Model(
        name=name,
        dtype=dtype,
        layers=int(layers),
        parameters=parameters,
        active=layers * (attention + used) + vocabulary / 2,
        pair_flops=2 * layers * heads * dim,
        kv_bytes_per_token=layers * kv_values * min(2, BYTES[dtype]),
        context=int(size("max_position_embeddings", default=0)),
        weight_bytes=parameters * (1 if quantised else BYTES[dtype]),
        kv_value_bytes=min(2, BYTES[dtype]),
    )


def estimated(model: Model, sheet: Sheet, gpus: int) -> EngineProfile | None:
    """The profile of an engine on `gpus` GPUs; None if weights and a few sequences do not fit."""
    speed = gpus * OF_TP[gpus]
    flops = sheet.flops_per_s * OF_FLOPS * speed
    bandwidth = sheet.bytes_per_s * OF_BANDWIDTH * speed
    room = gpus * (sheet.memory_bytes * OF_MEMORY - ACTIVATIONS_BYTES) - model.weight_bytes
    kv_tokens = int(room / model.kv_bytes_per_token)
    if kv_tokens < 2 * CHUNK_TOKENS:
        return None
    read_s = model.weight_bytes / bandwidth + STEP_S
    costs = CostModel(
        a=2 * model.active / flops,
        b=model.pair_flops / flops,
        c=read_s,
        d0=read_s,
        d1=2 * model.active / flops,
        d2=model.kv_bytes_per_token / bandwidth,
        chunk_tokens=CHUNK_TOKENS,
    )
    return EngineProfile(
        costs=costs,
        kv_tokens=float(kv_tokens),
        kv_bytes_per_token=model.kv_bytes_per_token,
        layers=model.layers,
        gpus=gpus,
        start_s=round(BOOT_S + model.weight_bytes / LOAD_BYTES_PER_S, 1),
        watts=sheet.watts * gpus,
        source="estimated",
        model=model.name,
        dtype=model.dtype,
    )
