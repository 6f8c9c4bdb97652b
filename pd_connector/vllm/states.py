# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in vLLM's pages: the sections of each kind of layer, and views of them.

A page of such a layer holds the state of one request. Its tensors lie one behind the other (`MambaSpec.shapes`),
a convolution as `[row][channel]` (SD) or, with `VLLM_SSM_CONV_STATE_LAYOUT=DS`, as `[channel][row]`. A further kind of
state is one more row of `_KINDS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pd_connector.codec.elements import DTYPE_NAMES, DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Section
from pd_connector.pages.layer import StatePages, StatePart, convolution_views

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

Parts = tuple[StatePart, ...]
_Shapes = Sequence[tuple[int, ...]]


class _Kind(NamedTuple):
    """A kind of recurrent layer.

    Attributes:
        tensors: number of tensors of its state.
        cut: returns the parts of each tensor, from the layer's name, this rank's shapes, the layer, and the number of
            ranks.
    """

    tensors: int
    cut: Callable[[str, _Shapes, Any, int], tuple[Parts, ...]]


def describe_states(
    name: str, spec: "MambaSpec", tensor: torch.Tensor, module: Any, ranks: int
) -> tuple[tuple[Section, ...], StatePages]:
    """The sections of a layer's state, and this rank's views of them.

    Args:
        name: the layer's name, for messages.
        spec: shapes and dtypes of the state's tensors on this rank.
        tensor: the layer's cache as vLLM registers it, int8 `[page, 1, 1, bytes]`; pages may be padded.
        module: the layer. Its attributes say what the shapes cannot.
        ranks: number of ranks of the tensor-parallel group.

    Raises:
        UnsupportedGeometryError: a kind of state, or a form of it, that cannot be moved.
    """
    name_of_kind = str(spec.mamba_type.name)
    kind = _KINDS.get(name_of_kind)
    if kind is None:
        raise UnsupportedGeometryError(
            f"state of {name} is of kind {name_of_kind}: PDConnector moves states of {', '.join(_KINDS)}; serve this model "
            "without disaggregation"
        )
    shapes = [tuple(int(extent) for extent in shape) for shape in spec.shapes]
    if len(shapes) != kind.tensors:
        raise UnsupportedGeometryError(
            f"state of {name} ({name_of_kind}) has {len(shapes)} tensors, wanted {kind.tensors}: the others are records of "
            "ReplaySSM or RecoverSSM, which PDConnector does not move; start the engine without --use-replayssm and "
            "--use-kda-recoverssm"
        )
    tensors = kind.cut(name, shapes, module, ranks)
    sections: list[Section] = []
    views: list[torch.Tensor] = []
    held = _tensors(tensor, shapes, spec.dtypes)
    if name_of_kind == "GDN_ATTN" and _keys_first(module):
        held[1] = held[1].view(*held[1].shape[:2], *reversed(shapes[1][1:])).transpose(2, 3)
    for parts, state in zip(tensors, held, strict=True):
        dtype = DTYPE_NAMES.get(state.dtype)
        if dtype is None:
            raise UnsupportedGeometryError(
                f"state of {name} has elements of {state.dtype}: PDConnector moves {', '.join(DTYPES)}"
            )
        for part, view in zip(parts, _views(name, parts, state), strict=True):
            if spec.tp_replicated:  # every rank holds all units
                view = view.permute(0, 2, 1, 3).view(len(view), 1, view.shape[2], -1)
                total = 1
            else:
                total = part.units_of(ranks)
            sections.append(Section(part.name, total, view.shape[2], view.shape[3], dtype))
            views.append(view)
    # `num_spec`: rows of its convolution that vLLM adds for speculation. Mamba1 has none.
    return tuple(sections), StatePages(tuple(views), int(getattr(module, "num_spec", 0)))


def describe_ring(
    name: str, spec: "CircularBufferSpec", tensor: torch.Tensor
) -> tuple[tuple[Section, ...], StatePages]:
    """The sections of a layer's ring, and this rank's views of them: one for each of vLLM's head slots (V4.1 and QSA have
    one, GLM-5-Next K and its gate). Token i is in row `i % rows`. Every rank holds the whole ring.

    Args:
        name: the layer's name, for messages.
        tensor: the layer's cache, `[page, slot, row, dim]`.

    Raises:
        UnsupportedGeometryError: a page is not one ring, or a dtype that cannot be moved.
    """
    _, slots, rows, dim = tensor.shape
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if rows != spec.block_size or dtype is None:
        raise UnsupportedGeometryError(
            f"ring of {name} has {rows} rows of {tensor.dtype}: PDConnector moves rings of {spec.block_size} rows, of "
            f"{', '.join(DTYPES)}; serve this model without disaggregation"
        )
    sections = tuple(Section(f"ring.{slot}", 1, rows, dim, dtype) for slot in range(slots))
    return sections, StatePages(tuple(tensor[:, slot : slot + 1] for slot in range(slots)))


def _tensors(
    tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """The tensors of a state, `[page, *shape]` each, in the memory of the pages."""
    pages = tensor.flatten(1).view(torch.uint8)
    tensors: list[torch.Tensor] = []
    first = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        stop = first + math.prod(shape) * dtype.itemsize
        tensors.append(pages[:, first:stop].view(dtype).unflatten(1, shape))
        first = stop
    return tensors


def _views(name: str, parts: Parts, state: torch.Tensor) -> list[torch.Tensor]:
    """The parts of one tensor, `[page, unit, row, dim]` each."""
    if state.ndim == 3 and _is_convolution(parts):
        state = state if _dims_first() else state.transpose(1, 2)  # [page, channel, row]
        return convolution_views(state, parts, f"convolution of {name}")
    return [state.unsqueeze(2) if state.ndim == 3 else state]


def _is_convolution(parts: Parts) -> bool:
    return parts[0].name.startswith("conv")


def _dims_first() -> bool:
    """Whether vLLM keeps a convolution as `[dim][row]`."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _keys_first(module: Any) -> bool:
    """Whether a delta net keeps its matrices as `[key dim][value dim]`. vLLM's CPU kernel does, although the spec says
    `[value dim][key dim]`, the layout of GPU kernels. If both dims have the same size, only the kernel's name tells the
    layout.

    The CPU kernel computes in bfloat16 only. Since vLLM 0.33 a float16 model on a CPU takes the Triton kernels instead,
    which keep `[value dim][key dim]`.
    """
    if getattr(getattr(module, "_forward_method", None), "__name__", "") != "forward_cpu":
        return False
    return bool(module.model_config.dtype == torch.bfloat16)


def _channels(shape: tuple[int, ...]) -> int:
    return shape[0 if _dims_first() else 1]


def _delta_net(name: str, shapes: _Shapes, module: Any, ranks: int) -> tuple[Parts, ...]:
    """Gated delta nets (Qwen3-Next, Qwen3.5) and KDA (Kimi Linear): Q, K and V of the convolution, and a matrix
    `[value dim, key dim]` of each head of V."""
    heads, value_dim, key_dim = shapes[1]
    keys, rest = divmod((_channels(shapes[0]) - heads * value_dim), 2 * key_dim)
    if keys < 1 or rest:
        raise UnsupportedGeometryError(
            f"convolution of {name} has {_channels(shapes[0])} channels: wanted Q and K of {key_dim} dims a head, and V "
            f"of {heads} heads of {value_dim}"
        )
    return (
        (
            StatePart("conv.q", keys, key_dim),
            StatePart("conv.k", keys, key_dim),
            StatePart("conv.v", heads, value_dim),
        ),
        (StatePart("ssm", heads, key_dim),),
    )


def _mamba2(name: str, shapes: _Shapes, module: Any, ranks: int) -> tuple[Parts, ...]:
    """Mamba2 (Nemotron-H, Bamba, Granite 4): x, B and C of the convolution, and a matrix `[head dim, state]` of each
    head. Where there are fewer groups of B and C than ranks, neighbouring ranks hold the same group."""
    heads, head_dim, state = shapes[1]
    groups, rest = divmod(_channels(shapes[0]) - heads * head_dim, 2 * state)
    if groups < 1 or rest:
        raise UnsupportedGeometryError(
            f"convolution of {name} has {_channels(shapes[0])} channels: wanted x of {heads} heads of {head_dim}, and B "
            f"and C of {state} a group"
        )
    total = groups * ranks
    if groups == 1 and ranks > 1:  # vLLM gives each rank a copy of the only group
        total = int(module.norm.n_groups)
    return (
        (
            StatePart("conv.x", heads, head_dim),
            StatePart("conv.b", groups, state, total),
            StatePart("conv.c", groups, state, total),
        ),
        (StatePart("ssm", heads, state),),
    )


def _mamba1(name: str, shapes: _Shapes, module: Any, ranks: int) -> tuple[Parts, ...]:
    """Mamba1 (Jamba): a convolution, and a row of state for each of its channels."""
    channels, state = shapes[1]
    return (StatePart("conv.x", channels, 1),), (StatePart("ssm", channels, state),)


def _short_conv(name: str, shapes: _Shapes, module: Any, ranks: int) -> tuple[Parts, ...]:
    """Short convolutions (LFM2)."""
    return ((StatePart("conv.x", _channels(shapes[0]), 1),),)


def _linear(name: str, shapes: _Shapes, module: Any, ranks: int) -> tuple[Parts, ...]:
    """Linear attention (Ring, MiniMax-Text): a matrix of each head."""
    heads, _, dim = shapes[0]
    return ((StatePart("ssm", heads, dim),),)


_KINDS: Mapping[str, _Kind] = {
    "GDN_ATTN": _Kind(2, _delta_net),
    "MAMBA2": _Kind(2, _mamba2),
    "MAMBA1": _Kind(2, _mamba1),
    "SHORT_CONV": _Kind(1, _short_conv),
    "LINEAR": _Kind(1, _linear),
}
"""By the name of vLLM's backend."""
