# SPDX-License-Identifier: Apache-2.0
"""vLLM's dtypes of a cache by names that mean one thing on every engine."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

kv = pytest.importorskip("vllm.v1.kv_cache_interface")

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from pd_connector.errors import UnsupportedGeometryError  # noqa: E402
from pd_connector.kv.geometry import Geometry, Group, Shard  # noqa: E402
from pd_connector.plan.route import routes  # noqa: E402
from pd_connector.vllm import cache  # noqa: E402


def dtype_of(stored: str, mode: object, scales: int = 1, layer: str = "") -> str:
    spec = SimpleNamespace(kv_quant_mode=mode, dtype=torch.uint8)
    module = SimpleNamespace(_k_scale=torch.ones(scales), _v_scale=torch.ones(scales))
    module.kv_cache_dtype = layer or stored
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=stored),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": module}),
    )
    return cache._dtype(SimpleNamespace(spec=spec, name="layers.0.attn"), config)


def test_codes_with_a_scale_for_each_head_are_not_read_by_one_scale() -> None:
    """vLLM tells the largest of them: it would do for one head only."""
    mode = kv.KVQuantMode.FP8_PER_TENSOR
    assert dtype_of("fp8", mode) in cache.DTYPES
    assert dtype_of("fp8", mode, scales=8) not in cache.DTYPES


def test_the_other_kind_of_fp8_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = kv.KVQuantMode.FP8_PER_TENSOR
    assert dtype_of("fp8", mode) == dtype_of("fp8_e4m3", mode) == "fp8_e4m3"
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert dtype_of("fp8", mode) == "fp8_e4m3fnuz"


def test_a_layer_that_stores_another_kind_of_fp8_than_the_engine_says_so() -> None:
    mode = kv.KVQuantMode.FP8_PER_TENSOR
    assert dtype_of("fp8", mode, layer="fp8_e5m2") not in cache.DTYPES
    assert dtype_of("fp8_e5m2", mode, layer="fp8") == "fp8_e4m3"


def group(dtype: str, scale: float = 1.0) -> Geometry:
    scales = ((scale, scale),) if scale != 1.0 else ()
    made = Group("attention", (0,), 2, 64, 64, 16, 0, dtype, "x", True, scales=scales)
    return Geometry(Shard(0, 1, 0, 1), (made,))


def test_codes_of_one_kind_are_never_taken_for_codes_of_the_other() -> None:
    fnuz, ocp = group("fp8_e4m3fnuz"), group("fp8_e4m3")
    assert [route.verbatim for route in routes(fnuz, fnuz, ["raw"], ["raw"])] == [True]
    for pair in ((fnuz, ocp), (ocp, fnuz)):
        with pytest.raises(UnsupportedGeometryError, match="fp8_e4m3fnuz"):
            routes(*pair, ["raw"], ["raw"])


def test_codes_that_no_codec_knows_pass_between_equal_scales_only() -> None:
    with pytest.raises(UnsupportedGeometryError, match="cannot be split"):
        routes(group("fp8_e4m3fnuz", 0.5), group("fp8_e4m3fnuz"), ["raw"], ["raw"])


def test_attention_in_chunks_is_refused_with_what_serves_it() -> None:
    """Llama 4: without vLLM's hybrid manager its layers keep everything, as full attention does."""
    spec = kv.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
    )
    layer = cache._Layer(0, "layers.0.attn", 0, spec, torch.zeros(1))
    with pytest.raises(UnsupportedGeometryError, match="--disable-hybrid-kv-cache-manager"):
        cache._kind(layer)


def test_a_ring_is_not_taken_for_a_window() -> None:
    """vLLM 0.31 derives `KpoolTailSpec` from a window's: one page of a request, which is overwritten in place."""

    class KpoolTailSpec(kv.SlidingWindowSpec):
        pass

    spec = KpoolTailSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=16
    )
    layer = cache._Layer(0, "layers.0.indexer.tail", 0, spec, torch.zeros(1))
    with pytest.raises(UnsupportedGeometryError, match="is of kind KpoolTailSpec"):
        cache._kind(layer)


def test_a_windowed_state_of_a_convolution_is_not_taken_for_a_latent() -> None:
    """Inkling keeps inputs of its short convolutions as a window without V, a part of the heads on each rank."""
    spec = kv.SlidingWindowSpec(
        block_size=4,
        num_kv_heads=2,
        head_size=64,
        head_size_v=0,
        dtype=torch.bfloat16,
        sliding_window=4,
    )
    layer = cache._Layer(0, "layers.0.conv_state", 0, spec, torch.zeros(1))
    with pytest.raises(UnsupportedGeometryError, match=r"layers\.0\.conv_state.*convolution"):
        cache._kind(layer)


def test_hidden_states_of_several_layers_are_not_taken_for_a_latent() -> None:
    spec = kv.HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=8, dtype=torch.bfloat16)
    layer = cache._Layer(0, "layers.0.hidden", 0, spec, torch.zeros(1))
    with pytest.raises(UnsupportedGeometryError, match="is of kind HiddenStateCacheSpec"):
        cache._kind(layer)


def one_layer(states: int) -> tuple[dict[str, torch.Tensor], object, object]:
    """A layer of MLA with 12 pages of 64 tokens, as vLLM makes and describes it."""
    spec = kv.MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=8, dtype=torch.uint8, tokens_per_state=64 // states
    )
    size = 12 * spec.page_size_bytes
    placed = kv.KVCacheTensor(size, ["layers.0.attn"], size, spec.page_size_bytes)
    memory = torch.zeros(size, dtype=torch.int8)
    (view,) = kv.create_kv_cache_views(memory, spec, 12, KVCacheLayout.LBNHC, placed)
    groups = [kv.KVCacheGroupSpec(placed.layers, spec)]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
            world_size=1,
        ),
    )
    return {"layers.0.attn": view}, kv.KVCacheConfig(12, [placed], groups), config


def test_a_page_with_other_entries_than_its_spec_says_is_not_taken_for_a_part_of_a_page() -> None:
    """DeepSeek V4 compresses several tokens into one entry, and says so. A page 1 of others would pass as pages 4 to 7."""
    caches, layout, config = one_layer(states=16)
    (group,) = cache.describe_cache(caches, layout, config, {"layers.0.attn": 0}).geometry.groups
    assert (group.page_size, group.state_tokens, group.page_entries) == (64, 4, 16)
    by_kernel_pages = {name: view.view(24, 1, 8, -1) for name, view in caches.items()}
    found = cache.describe_cache(by_kernel_pages, layout, config, {"layers.0.attn": 0})
    assert found.geometry.groups[0].page_entries == 16
    other = one_layer(states=64)[1]
    for views in (caches, by_kernel_pages):
        with pytest.raises(
            UnsupportedGeometryError, match="16 entries for the 64 tokens of a page"
        ):
            cache.describe_cache(views, other, config, {"layers.0.attn": 0})
    caches, layout, config = one_layer(states=64)
    assert cache.describe_cache(caches, layout, config, {"layers.0.attn": 0}).pages == 12


def test_a_page_of_a_recurrent_layer_is_one_state() -> None:
    """Whatever its tokens are."""
    dtypes = torch.bfloat16, torch.float32
    shapes = (3, 2 * 8 + 2 * 4), (2, 8, 4)
    spec = kv.MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, page_size_padded=1024)
    size = 12 * spec.page_size_bytes
    placed = kv.KVCacheTensor(size, ["layers.0.mixer"], size, spec.page_size_bytes)
    memory = torch.zeros(size, dtype=torch.int8)
    (view,) = kv.create_kv_cache_views(memory, spec, 12, KVCacheLayout.LBHNC, placed)
    layout = kv.KVCacheConfig(12, [placed], [kv.KVCacheGroupSpec(placed.layers, spec)])
    numbers = {"layers.0.mixer": 0}
    found = cache.describe_cache({"layers.0.mixer": view}, layout, one_layer(64)[2], numbers)
    (group,) = found.geometry.groups
    assert [section.name for section in group.sections] == ["conv.x", "conv.b", "conv.c", "ssm"]
    assert found.pages == 12


def test_a_model_that_keeps_no_kv_is_told_so() -> None:
    with pytest.raises(UnsupportedGeometryError, match="start it without --kv-transfer-config"):
        cache.describe_cache({}, kv.KVCacheConfig(1, [], []), one_layer(64)[2], {})


def test_pages_that_a_backend_packs_its_own_way_are_not_taken_apart() -> None:
    """B12X keeps K of all heads as one head, and V as another. With two KV heads its pages have the very size of
    pages with a head's K beside its V."""
    plain = kv.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    packed = dataclasses.replace(plain, num_head_slots=2, state_content_bytes=2 * 8 * 2)
    assert packed.page_size_bytes == plain.page_size_bytes
    backend = SimpleNamespace(get_name=lambda: "B12X")
    found = []
    for spec in (plain, packed):
        size = 12 * spec.page_size_bytes
        placed = kv.KVCacheTensor(size, ["layers.0.attn"], size, spec.page_size_bytes)
        memory = torch.zeros(size, dtype=torch.int8)
        (view,) = kv.create_kv_cache_views(memory, spec, 12, KVCacheLayout.LBHNC, placed)
        layer = cache._Layer(0, "layers.0.attn", 0, spec, view.to("meta"))
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(
                static_forward_context={"layers.0.attn": SimpleNamespace(attn_backend=backend)}
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
        )
        found.append(cache._describe(layer, config))
    (known, _), (opaque, pages) = found
    assert (known.dtype, known.key_dim, known.value_dim) == ("bfloat16", 8, 8)
    assert (opaque.dtype, opaque.value_dim) == ("bfloat16 as B12X packs it", 0)
    assert pages.value is None
    assert known.heads_apart
    assert not opaque.heads_apart, "what looks like a head is K of all heads"
