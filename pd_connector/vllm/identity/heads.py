# SPDX-License-Identifier: Apache-2.0
"""Number of a layer's KV heads in the whole model, read from the module that was built for the layer. The model's
config has one number, and layers with a sliding window may have another (MiMo-V2, Gemma 4, Step-3.5)."""

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.heads import named_heads, total_heads
from pd_connector.vllm.identity.owners import owners

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layer_heads(vllm_config: "VllmConfig", layer: str, own: int) -> int:
    """KV heads of a layer in the whole model.

    Args:
        layer: its name.
        own: number of KV heads that this rank holds.

    Raises:
        UnsupportedGeometryError: its modules do not name the number.
    """
    attention = vllm_config.compilation_config.static_forward_context.get(layer)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    try:
        return total_heads(layer, own, ranks, _named(attention, own))
    except UnsupportedGeometryError as error:
        if not isinstance(attention, torch.nn.Module) or next(owners(attention), None) is not None:
            raise
        raise UnsupportedGeometryError(
            f"{error}. The modules around it are not known: does VLLM_PLUGINS leave out pd_connector?"
        ) from None


def _named(attention: Any, own: int) -> frozenset[int]:
    """Number of heads in the nearest module that states it: the attention, or a module around it, up to the list of
    layers."""
    if not isinstance(attention, torch.nn.Module):
        return named_heads([attention])
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    above = itertools.takewhile(lambda owner: not isinstance(owner, lists), owners(attention))
    for module in itertools.chain([attention], above):
        if named := named_heads(module.modules()):
            return named
        if _is_replicated(module):
            return frozenset([own])
    return frozenset()


def _is_replicated(module: torch.nn.Module) -> bool:
    """Whether every rank computes K and V of all heads (Step-3)."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return isinstance(getattr(module, "qkv_proj", None), ReplicatedLinear)
