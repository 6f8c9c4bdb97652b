# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in SGLang's `MambaPool`: the sections of each kind of layer, and views of them.

A slot of the pool holds the state of one request in all layers: a convolution, `[channel][row]` (of KDA
`[row][channel]`), and a matrix of each head. SGLang's decode engine goes on from the token that the prefill engine has
chosen, so a state passes as it stands after the whole prompt. A further kind of state is one more row of `_KINDS`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pd_connector.codec.elements import DTYPE_NAMES, DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Group, Section, Shard, state_group
from pd_connector.pages.layer import StatePages, StatePart, convolution_views

Parts = tuple[StatePart, ...]


def state_parts(model: torch.nn.Module) -> Parts:
    """The parts of a convolution of this model, in the order of its channels, read from the model's layers. Empty if
    the model has no recurrent layers of a known kind.

    Raises:
        UnsupportedGeometryError: its recurrent layers are not alike.
    """
    kinds = {
        cut(module)
        for module in model.modules()
        if (cut := _KINDS.get(type(module).__name__)) is not None
    }
    if len(kinds) > 1:
        raise UnsupportedGeometryError(
            f"recurrent layers whose convolutions are {' and '.join(map(str, kinds))}: PDConnector moves states that are "
            "alike in all layers; serve this model without disaggregation"
        )
    return next(iter(kinds), ())


def describe_states(
    pool: Any, parts: Parts, shard: Shard, table: int, attends: frozenset[int] = frozenset()
) -> tuple[dict[int, StatePages], Group]:
    """The states of a rank: views by the layer's number in the model, and their group.

    Args:
        pool: SGLang's `MambaPool`.
        parts: parts of its convolutions (`state_parts`).
        table: the page table that lists a request's slot.
        attends: layers that have KV.

    Raises:
        UnsupportedGeometryError: a kind of state that cannot be moved.
    """
    kind = type(pool).__name__
    if kind != "MambaPool" or not parts or len(pool.mamba_cache.conv) != 1:
        raise UnsupportedGeometryError(
            f"{kind} with {len(pool.mamba_cache.conv)} convolutions: PDConnector moves states of {', '.join(_KINDS)}; "
            "serve this model without disaggregation"
        )
    if pool._slot_siblings:
        names = ", ".join(type(sibling).__name__ for sibling in pool._slot_siblings)
        raise UnsupportedGeometryError(
            f"{names} beside a MambaPool: PDConnector moves convolutions and matrices; serve this model without "
            "disaggregation"
        )
    if both := sorted(attends.intersection(pool.mamba_layer_ids)):
        raise UnsupportedGeometryError(
            f"layer {both[0]} has attention and a state: PDConnector moves one or the other of a layer; use vLLM, or serve "
            "this model without disaggregation"
        )
    convolution = pool.mamba_cache.conv[0]
    if pool.conv_slice_axis == 1:  # KDA keeps rows first
        convolution = convolution.transpose(2, 3)
    views_of_parts = convolution_views(convolution, parts, f"a convolution of {kind}")
    tensors = [
        (part.name, part.units_of(shard.tp_size), view)
        for part, view in zip(parts, views_of_parts, strict=True)
    ]
    matrices = pool.mamba_cache.temporal
    if _keys_first(pool, parts):
        value_dim, key_dim = matrices.shape[3:]
        matrices = matrices.flatten(3).unflatten(3, (key_dim, value_dim)).transpose(3, 4)
    if matrices.numel():  # a short convolution has none
        tensors.append(("ssm", matrices.shape[2] * shard.tp_size, matrices))
    sections = tuple(
        Section(name, units, tensor.shape[3], tensor.shape[4], _dtype(name, tensor))
        for name, units, tensor in tensors
    )
    views = {
        number: StatePages(tuple(tensor[place] for _, _, tensor in tensors))
        for place, number in enumerate(pool.mamba_layer_ids)
    }
    return views, state_group(tuple(views), sections, table)


def _keys_first(pool: Any, parts: Parts) -> bool:
    """Whether a delta net keeps its matrices as `[key dim][value dim]`, as SGLang's kernels for a CPU do. Those for a GPU keep
    `[value dim][key dim]`, and KDA has no others. The pool's shape is the same, so nothing else tells."""
    from sglang.srt.utils import is_cpu

    return is_cpu() and parts[0].name == "conv.q" and pool.conv_slice_axis != 1


def _dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedGeometryError(
            f"{name} of a state has elements of {tensor.dtype}: PDConnector moves {', '.join(DTYPES)} "
            "(SGLANG_MAMBA_CONV_DTYPE, SGLANG_MAMBA_SSM_DTYPE)"
        )
    return dtype


def _delta_net(module: Any) -> Parts:
    """Gated delta nets (Qwen3-Next, Qwen3.5) and KDA (Kimi Linear): Q, K and V."""
    return (
        StatePart("conv.q", module.num_q_heads, module.head_q_dim),
        StatePart("conv.k", module.num_k_heads, module.head_k_dim),
        StatePart("conv.v", module.num_v_heads, module.head_v_dim),
    )


def _mamba2(module: Any) -> Parts:
    """Mamba2 (Nemotron-H, Granite 4, Falcon-H1): x by head, then B and C by group. Where there is one group, every rank
    holds a copy."""
    ranks = module.tp_size
    groups, total = module.n_groups // ranks, int(module.norm.n_groups)
    return (
        StatePart("conv.x", module.num_heads // ranks, module.head_dim),
        StatePart("conv.b", groups, module.ssm_state_size, total),
        StatePart("conv.c", groups, module.ssm_state_size, total),
    )


def _short_convolution(module: Any) -> Parts:
    """Short convolutions (LFM2)."""
    return (StatePart("conv.x", int(module.hidden_size_per_partition), 1),)


_KINDS: Mapping[str, Callable[[Any], Parts]] = {
    "RadixLinearAttention": _delta_net,
    "MambaMixer2": _mamba2,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
}
"""By the name of SGLang's class."""
