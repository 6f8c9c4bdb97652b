# SPDX-License-Identifier: Apache-2.0
"""How a vLLM layer rotates its keys, from the values with which its module was made."""

from collections.abc import Mapping

import torch

from pd_connector.kv import rotation_table
from pd_connector.kv.rotation_table import Made, Row, table_row
from pd_connector.vllm.identity.owners import owners

_LEVELS = 4
"""Owners searched for the rotation of a layer's keys: the attention block, and modules around it."""
_OF_TRANSFORMERS = ("default", "linear", "llama3", "yarn")
"""Types of rotation that a transformers module keeps for its whole life."""


def rotation_text(layer: torch.nn.Module) -> str | None:
    """The rotation of a layer's keys. Empty if its block says that it does not rotate (every fourth layer of Llama
    4), None if the block has no known rotation."""
    for owner in _blocks(layer):
        rotaries = {name: part for name, part in owner.named_children() if is_rotary(part)}
        if rotaries:
            return "; ".join(_text(rotaries[name]) for name in sorted(rotaries))
        if getattr(owner, "rotary_emb", owner) is None:
            return ""
    return None


def is_rotary(module: torch.nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


def _blocks(layer: torch.nn.Module) -> list[torch.nn.Module]:
    return [owner for _, owner in zip(range(_LEVELS), owners(layer), strict=False)]


def _text(module: torch.nn.Module) -> str:
    made = _made_with(module)
    if made is not None:
        return rotation_table.rotation_text(module, made, _row(module))
    made = _made_by_transformers(module)
    return rotation_table.rotation_text(module, made, _row_of_frequencies(module) if made else None)


def _made_by_transformers(module: torch.nn.Module) -> Made | None:
    """The same for a module of transformers, with which vLLM runs models that it has no code for. None if the
    rotation depends on a batch, or differs from layer to layer.

    The module does not say how dims pair; they are taken to pair by halves. If an engine says otherwise, its
    rotation differs.
    """
    frequencies = getattr(module, "inv_freq", None)
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(frequencies, torch.Tensor) or not isinstance(parameters, Mapping):
        return None
    if parameters.get("rope_type", "default") not in _OF_TRANSFORMERS:
        return None
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return None
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    return Made(parameters, 2 * len(frequencies), False, longest)


def _row_of_frequencies(module: torch.nn.Module) -> Row:
    """Rows of the table that a transformers module computes when it is used."""
    frequencies = module.inv_freq.detach().double().cpu()
    magnitude = float(getattr(module, "attention_scaling", 1.0))

    def row(position: int) -> list[float]:
        angles = position * frequencies
        values: list[float] = (torch.cat([angles.cos(), angles.sin()]) * magnitude).tolist()
        return values

    return row


def _made_with(module: torch.nn.Module) -> Made | None:
    """The arguments with which vLLM made the module, from vLLM's own register."""
    from vllm.model_executor.layers import rotary_embedding

    for key, rotary in getattr(rotary_embedding, "_ROPE_DICT", {}).items():
        if rotary is not module:
            continue
        _, rotary_dim, max_position, is_neox_style, parameters, dual_chunk = key[:6]
        defining = dict(parameters or ())
        if dual_chunk is not None:
            defining |= {"rope_type": "dual_chunk", "dual_chunk": dict(dual_chunk)}
        if defining.get("rope_type") == "yarn" and hasattr(module, "cache_max_position_num"):
            # vLLM's multimodal YaRN stretches from the number of positions in its table.
            defining["original_max_position_embeddings"] = module.cache_max_position_num
        long = bool(getattr(module, "use_long_rope", False))
        return Made(defining, int(rotary_dim), not is_neox_style, int(max_position), long)
    return None


def _row(module: torch.nn.Module) -> Row | None:
    """Rows of a LongRoPE table, which has a part for short sequences and a part for long ones."""
    both = dict(module.named_buffers(recurse=False)).get("long_short_cos_sin_cache")
    if both is None:
        return None
    first = int(getattr(module, "original_max_position_embeddings", 0))
    return (
        table_row(both, first)
        if getattr(module, "use_long_rope", False)
        else table_row(both, 0, first)
    )
