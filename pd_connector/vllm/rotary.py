# SPDX-License-Identifier: Apache-2.0
"""How a layer of vLLM's rotates its keys, by the values that its module was made with."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from pd_connector.kv.rotation import Rotation, rotation_of
from pd_connector.vllm.owners import owners

logger = logging.getLogger("pd_connector.vllm")

_LEVELS = 4
"""Owners that are asked for the rotation of a layer's keys: the attention block, and around it."""
_POSITIONS = (1, 17, 1024, 16384)
"""At which the table that is in use is compared with what its parameters say. The farther, the smaller
a difference of frequencies that shows; at the last of these float32 is good for 0.002."""
_ROWS = 32
"""First positions of a table that stand for it where its parameters do not."""
_TOLERANCE = 0.02
"""Tables may be kept in bfloat16."""


def rotation_text(layer: torch.nn.Module) -> str | None:
    """The rotation of a layer's keys; None where the layer's block has none that is known."""
    for owner in _blocks(layer):
        found = {name: part for name, part in owner.named_children() if is_rotary(part)}
        if found:
            return "; ".join(_text(found[name]) for name in sorted(found))
    return None


def is_rotary(module: torch.nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


def _blocks(layer: torch.nn.Module) -> list[torch.nn.Module]:
    return [owner for _, owner in zip(range(_LEVELS), owners(layer), strict=False)]


def _text(module: torch.nn.Module) -> str:
    made = _made_with(module)
    if made is not None:
        rotation = rotation_of(
            made["parameters"],
            dims=int(made["rotary_dim"]),
            interleaved=not made["is_neox_style"],
            max_positions=int(made["max_position"]),
            long=bool(getattr(module, "use_long_rope", False)),
        )
        if not rotation.frequencies or agrees(rotation, module):
            return rotation.text
        logger.warning(
            "the rotary table of %s is not what its parameters say: engines are compared by the table",
            type(module).__name__,
        )
    return f"{type(module).__name__} {_table_text(module, made)}"


def _made_with(module: torch.nn.Module) -> dict[str, Any] | None:
    """The arguments that vLLM made the module with, from its own register of these."""
    from vllm.model_executor.layers import rotary_embedding

    for key, known in getattr(rotary_embedding, "_ROPE_DICT", {}).items():
        if known is not module:
            continue
        head_size, rotary_dim, max_position, is_neox_style, parameters, dual_chunk = key[:6]
        told = dict(parameters or ())
        if dual_chunk is not None:
            told |= {"rope_type": "dual_chunk", "dual_chunk": dict(dual_chunk)}
        if told.get("rope_type") == "yarn" and hasattr(module, "cache_max_position_num"):
            # A multimodal YaRN of vLLM's stretches from as many positions as its table has.
            told["original_max_position_embeddings"] = module.cache_max_position_num
        return {
            "head_size": head_size,
            "rotary_dim": rotary_dim,
            "max_position": max_position,
            "is_neox_style": is_neox_style,
            "parameters": told,
        }
    return None


def agrees(rotation: Rotation, module: torch.nn.Module) -> bool:
    """Whether the table that a module uses is the one that this rotation says."""
    table = _table(module)
    if table is None:
        return True
    pairs = len(rotation.frequencies)
    if len(table) <= _POSITIONS[0] or table.shape[-1] < 2 * pairs:
        return False
    for position in _POSITIONS:
        if position >= len(table):
            break
        row = table[position].double().cpu()
        for sign, (function, part) in enumerate(
            ((math.cos, row[:pairs]), (math.sin, row[pairs : 2 * pairs]))
        ):
            wanted = [
                rotation.magnitude * function(position * frequency)
                for frequency in rotation.frequencies
            ]
            off = (part - torch.tensor(wanted, dtype=torch.float64)).abs().max().item()
            if off > _TOLERANCE * max(1.0, rotation.magnitude):
                logger.debug("part %d of position %d is off by %g", sign, position, off)
                return False
    return True


def _table(module: torch.nn.Module) -> torch.Tensor | None:
    """Cosines and sines `[position, dims]` that are in use."""
    buffers: Mapping[str, torch.Tensor] = dict(module.named_buffers(recurse=False))
    if (both := buffers.get("long_short_cos_sin_cache")) is not None:
        first = int(getattr(module, "original_max_position_embeddings", 0))
        return both[first:] if getattr(module, "use_long_rope", False) else both[:first]
    table = buffers.get("cos_sin_cache")
    return None if table is None or table.dim() != 2 else table


def _table_text(module: torch.nn.Module, made: Mapping[str, Any] | None) -> str:
    """What is known of a rotation that its parameters do not define, as text.

    Args:
        made: what vLLM made the module with, if that is known.
    """
    numbers = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name != "training"
    }
    table = _table(module)
    rows = [] if table is None else table[:_ROWS].double().flatten().tolist()
    rounded = [f"{number:.3f}" for number in rows]
    told = {"numbers": numbers, "made": made or {}, "table": rounded}
    return json.dumps(told, sort_keys=True, default=str)
