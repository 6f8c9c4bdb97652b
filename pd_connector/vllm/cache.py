# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache in our terms: the geometry of a rank, and each layer's pages as K and V, or as sections of a state."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from pd_connector.codec.elements import DTYPE_NAMES, DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Geometry, Group, Kind, state_group
from pd_connector.pages.layer import StatePages
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.vllm.identity.heads import layer_heads
from pd_connector.vllm.packing import CpuPacking
from pd_connector.vllm.shards import context_parallel, own_shard
from pd_connector.vllm.states import describe_ring, describe_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec

logger = logging.getLogger("pd_connector.vllm")

_FLOATS = ("bfloat16", "float16", "float32")


class _Layer(NamedTuple):
    """One of vLLM's layers, before layers of a kind are grouped."""

    number: int  # as `layers.identify` counts
    name: str
    table: int
    spec: "AttentionSpec | MambaSpec"
    tensor: (
        torch.Tensor
    )  # [page, head, token, K and V], any strides; of a state int8 [page, 1, 1, bytes]


def describe_cache(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
    vllm_config: "VllmConfig",
    numbers: Mapping[str, int],
) -> PagedCache:
    """The caches given to `register_kv_caches`, as a `PagedCache`.

    Args:
        numbers: the layer number of each cache.

    Raises:
        UnsupportedGeometryError: a kind of layer cannot be moved.
    """
    layers = list(_layers(kv_caches, kv_cache_config, numbers))
    if not layers and vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise UnsupportedGeometryError(
            "this model keeps no KV (its attention is that of an encoder), so there is nothing to move or to keep: "
            "start it without --kv-transfer-config"
        )
    groups: dict[tuple[object, ...], list[tuple[Group, LayerPages | StatePages]]] = {}
    for layer in sorted(layers, key=lambda layer: layer.number):
        group, pages = _describe(layer, vllm_config)
        alike = msgspec.structs.replace(group, layers=(0,), scales=())
        form = pages.key.shape[1:] if isinstance(pages, LayerPages) else ()
        groups.setdefault((alike, form), []).append((group, pages))
    merged = tuple(_merge([group for group, _ in members]) for members in groups.values())
    views = {g.layers[0]: pages for members in groups.values() for g, pages in members}
    for group in merged:
        if group.kind != "state" and group.dtype not in DTYPES:
            logger.warning(
                "layers %d-%d hold %s: PDConnector cannot interpret such pages. They pass unchanged, without "
                "a codec, and only between engines whose pages have the same form",
                min(group.layers),
                max(group.layers),
                group.dtype,
            )
    replayed = {layer.table for layer in layers if layer.spec.prefix_replay_tokens}
    shard = own_shard(vllm_config, [layer.number for layer in layers])
    geometry = Geometry(shard, merged, tuple(sorted(replayed)))
    # For async loads vLLM leaves out the zeroing of new pages that such caches need.
    return PagedCache(views, geometry, clears=bool(kv_cache_config.needs_kv_cache_zeroing))


def _layers(
    kv_caches: dict[str, torch.Tensor], kv_cache_config: "KVCacheConfig", numbers: Mapping[str, int]
) -> Iterator[_Layer]:
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        CircularBufferSpec,
        UniformTypeKVCacheSpecs,
    )

    seen: set[tuple[int, int]] = set()
    for table in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[table]
        for name in group.layer_names:
            tensor = kv_caches.get(name)
            if tensor is None:  # belongs to another pipeline stage
                continue
            if (table, tensor.data_ptr()) in seen:  # layers that share one cache
                continue
            seen.add((table, tensor.data_ptr()))
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if isinstance(spec, AttentionSpec) and not isinstance(spec, CircularBufferSpec):
                _check_entries(name, tensor, kv_cache_config.num_blocks, spec)
            yield _Layer(numbers[name], name, table, spec, tensor)


def _check_entries(name: str, tensor: torch.Tensor, pages: int, spec: "AttentionSpec") -> None:
    """Raises UnsupportedGeometryError if a page does not have as many entries as its spec says. Treated as parts of pages,
    such pages would be pages of other requests."""
    entries = tensor.shape[0] * tensor.shape[2] // pages  # a kernel's page may be a part of vLLM's
    if spec.tokens_per_state < 1 or entries * spec.tokens_per_state != spec.block_size:
        raise UnsupportedGeometryError(
            f"cache of {name} keeps {entries} entries for the {spec.block_size} tokens of a page, and its spec says one for "
            f"{spec.tokens_per_state}: PDConnector moves caches with an entry for each token, or for each few tokens; serve "
            "this model without disaggregation"
        )


def _describe(layer: _Layer, vllm_config: "VllmConfig") -> tuple[Group, LayerPages | StatePages]:
    from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

    if isinstance(layer.spec, CircularBufferSpec):
        sections, states = describe_ring(layer.name, layer.spec, layer.tensor)
        return state_group((layer.number,), sections, layer.table), states
    if isinstance(layer.spec, MambaSpec):
        module = vllm_config.compilation_config.static_forward_context.get(layer.name)
        ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        sections, states = describe_states(layer.name, layer.spec, layer.tensor, module, ranks)
        return state_group((layer.number,), sections, layer.table), states
    spec, tensor = layer.spec, layer.tensor
    kind, window = _kind(layer)
    has_values = kind == "attention" and spec.head_size_v > 0
    kernel_page_size = tensor.shape[2]
    dtype = _dtype(layer, vllm_config)
    convertible = dtype in DTYPES
    order = _order(tensor)
    packing = CpuPacking.of(vllm_config, layer.name) if tensor.device.type == "cpu" else None
    if convertible and getattr(spec, "state_content_bytes", None) is not None:
        dtype, convertible = f"{dtype} as {_backend(vllm_config, layer.name)} packs it", False
    if packing is not None and has_values and not packing.covers(spec, kernel_page_size):
        dtype, convertible = f"{dtype} packed as {packing.name}", False
    if convertible:
        tensor = tensor.view(DTYPES[dtype])
        key_dim, value_dim = int(spec.head_size), int(spec.head_size_v)
        key, value = _halves(tensor, key_dim, value_dim, packing if has_values else None)
    else:  # opaque bytes
        tensor = tensor.view(torch.uint8)
        key, value = tensor, None
        key_dim, value_dim = tensor.shape[3], 0
    rows, heads_apart = _rows(layer.tensor, may_split=not _packs_heads(spec))
    where = packing.name if packing else _backend(vllm_config, layer.name)
    # Scales count for pages that pass unchanged, too: different scales mean different values.
    scales = (1.0, 1.0) if dtype in _FLOATS else _scales(layer, vllm_config)
    group = Group(
        kind=kind,
        layers=(layer.number,),
        heads=_heads(layer, kind, vllm_config),
        key_dim=key_dim,
        value_dim=value_dim,
        page_size=int(spec.block_size),
        window=window,
        dtype=dtype,
        layout=f"{tensor.device.type}/{where}/{order}/{kernel_page_size}"
        if rows is not None
        else "",
        heads_apart=heads_apart,
        table=layer.table,
        scales=(scales,),
        state_tokens=int(spec.tokens_per_state),
        interleave=_interleave(spec, vllm_config),
    )
    return group, LayerPages(key, value, () if rows is None else (rows,))


def _interleave(spec: "AttentionSpec", vllm_config: "VllmConfig") -> int:
    """Number of consecutive tokens that a context-parallel rank holds (vLLM's interleave size). 0: every rank holds all
    tokens, for example of a draft model that runs without context parallelism."""
    cp_size, _ = context_parallel(vllm_config)
    if cp_size == 1 or not spec.dcp_sharded:
        return 0
    return int(vllm_config.parallel_config.cp_kv_cache_interleave_size)


def _packs_heads(spec: "AttentionSpec") -> bool:
    """Whether the heads axis of a page does not count KV heads. B12X packs K of all heads into one slot, and V into
    another."""
    return getattr(spec, "num_head_slots", None) is not None


def _heads(layer: _Layer, kind: Kind, vllm_config: "VllmConfig") -> int:
    """Number of KV heads of a layer in the whole model. Packed heads pass only between engines with equally many ranks,
    so each rank counts as if its heads were its own."""
    if kind == "latent":
        return 1
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if _packs_heads(layer.spec):
        return int(layer.tensor.shape[1]) * ranks
    if not layer.spec.head_size_v:  # Inkling's convolutions are shared as K and V are, never copied
        return int(layer.spec.num_kv_heads) * ranks
    return layer_heads(vllm_config, layer.name, int(layer.spec.num_kv_heads))


def _kind(layer: _Layer) -> tuple[Kind, int]:
    """The kind of a layer's cache, and its window in tokens (0: no window)."""
    from vllm.v1 import kv_cache_interface as kv

    spec = layer.spec
    mend = "serve this model without disaggregation"
    window = int(spec.sliding_window) if isinstance(spec, kv.SlidingWindowSpec) else 0
    # 0.31 has a ring below `SlidingWindowSpec`. Hidden states are below `MLAAttentionSpec`.
    if type(spec) in (kv.MLAAttentionSpec, kv.SlidingWindowMLASpec) and spec.num_kv_heads == 1:
        return "latent", window
    if type(spec) in (kv.FullAttentionSpec, kv.SlidingWindowSpec):
        return "attention", window  # without V: inputs of Inkling's short convolutions
    if isinstance(spec, kv.ChunkedLocalAttentionSpec):  # Llama 4's; full attention keeps all KV
        mend = "start both engines with --disable-hybrid-kv-cache-manager"
    raise UnsupportedGeometryError(
        f"cache of {layer.name} is of kind {type(spec).__name__}: PDConnector moves full and "
        f"sliding-window attention, MLA latents and recurrent states; {mend}"
    )


def _dtype(layer: _Layer, vllm_config: "VllmConfig") -> str:
    from vllm.v1.kv_cache_interface import KVQuantMode

    module = vllm_config.compilation_config.static_forward_context.get(layer.name)
    own = getattr(layer.spec, "cache_dtype_str", None) or getattr(module, "kv_cache_dtype", None)
    stored = str(own or vllm_config.cache_config.cache_dtype)
    mode = layer.spec.kv_quant_mode
    if mode is KVQuantMode.FP8_PER_TENSOR and stored in ("fp8", "fp8_e4m3"):
        codes = "fp8_e4m3fnuz" if _is_fnuz() else "fp8_e4m3"
        return f"{codes} scaled by head" if _scaled_by_head(layer, vllm_config) else codes
    name = DTYPE_NAMES.get(layer.spec.dtype)
    return name if mode is KVQuantMode.NONE and name else f"{stored}/{mode.name}"


def _is_fnuz() -> bool:
    """Whether this device's FP8 has no negative zero and no infinities (fnuz). Its codes stand for half of OCP's
    values."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def _scaled_by_head(layer: _Layer, vllm_config: "VllmConfig") -> bool:
    """Whether each head has its own scale (llm-compressor's `attn_head`). vLLM reports only the largest scale."""
    module = vllm_config.compilation_config.static_forward_context.get(layer.name)
    scales = (getattr(module, name, None) for name in ("_k_scale", "_v_scale"))
    return any(scale is not None and scale.numel() > 1 for scale in scales)


def _halves(
    tensor: torch.Tensor, key_dim: int, value_dim: int, packing: CpuPacking | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of a layer, `[page, head, token, dim]` each."""
    if packing is not None:
        return packing.halves(tensor, key_dim, value_dim)
    if not value_dim:
        return tensor[..., :key_dim], None
    return tensor[..., :key_dim], tensor[..., key_dim : key_dim + value_dim]


def _rows(tensor: torch.Tensor, *, may_split: bool) -> tuple[torch.Tensor | None, bool]:
    """The layer as bytes, for pages that pass unchanged; and whether its heads lie apart.

    Args:
        may_split: each head of the tensor is a KV head.
    """
    size = tensor.element_size()
    pages, heads, tokens, width = tensor.shape
    apart = may_split and tensor.stride(3) == 1 and tensor.stride(2) == width
    dense = _is_dense(tensor.shape[1:], tensor.stride()[1:])
    if not (apart or dense):
        return None, False
    shape = (pages, heads, tokens * width) if apart else (pages, 1, heads * tokens * width)
    strides = (tensor.stride(0), tensor.stride(1), 1) if apart else (tensor.stride(0), 0, 1)
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    rows.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (*shape[:2], shape[2] * size),
        (strides[0] * size, strides[1] * size, 1),
    )
    return rows, apart


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return bool(expected == math.prod(shape))


def _order(tensor: torch.Tensor) -> str:
    """The order of axes within a page, outermost first, such as HNC."""
    return "".join("HNC"[axis] for axis in sorted(range(3), key=lambda a: -tensor.stride(a + 1)))


def _scales(layer: _Layer, vllm_config: "VllmConfig") -> tuple[float, float]:
    """Factors to multiply stored K and V with."""
    module = vllm_config.compilation_config.static_forward_context.get(layer.name)
    return float(getattr(module, "_k_scale_float", 1.0)), float(
        getattr(module, "_v_scale_float", 1.0)
    )


def _backend(vllm_config: "VllmConfig", name: str) -> str:
    module = vllm_config.compilation_config.static_forward_context.get(name)
    backend = getattr(module, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else "unknown"


def _merge(groups: list[Group]) -> Group:
    """Merge layers that differ only in their number and scales."""
    ordered = sorted(groups, key=lambda group: group.layers)
    scales = tuple(pair for group in ordered for pair in group.scales)  # states have none
    return msgspec.structs.replace(
        ordered[0],
        layers=tuple(group.layers[0] for group in ordered),
        scales=scales if any(pair != (1.0, 1.0) for pair in scales) else (),
    )
