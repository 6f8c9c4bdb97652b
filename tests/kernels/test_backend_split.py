# SPDX-License-Identifier: Apache-2.0
"""A batch is cut into decodes and a rest, and no token is lost or counted twice; what a GPU backend
says of itself is what vLLM asks it."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from pd_kernels.vllm import paged_backend, plugin
from pd_kernels.vllm.batch_split import decodes_of, rest_of
from pd_kernels.vllm.paged_builder import PagedMetadata
from pd_kernels.vllm.paged_cpu import PagedCpu
from pd_kernels.vllm.paged_cuda import PagedFlash, PagedFlashBuilder, PagedFlashImpl

MOST = 100
"""Requests of an engine."""


def batch(queries: list[int], padding: int = 0, **changed: Any) -> CommonAttentionMetadata:
    """Requests with these numbers of new tokens, and `padding` requests that pad the batch."""
    count = len(queries) + padding
    starts = torch.tensor([0, *queries, *[0] * padding]).cumsum(0).int()
    tokens = int(starts[-1])
    lengths = torch.tensor([n + 100 * row for row, n in enumerate(queries)] + [0] * padding)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths.int(),
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(count * 3).view(count, 3).int(),
        slot_mapping=torch.arange(tokens),
        positions=torch.arange(tokens) + 1000,
        **changed,
    )


@given(
    decodes=st.integers(0, 6),
    queries=st.integers(1, 4),
    rest=st.lists(st.integers(1, 40), max_size=5),
)
@settings(max_examples=80, deadline=None)
def test_every_token_is_a_decode_or_in_the_rest(
    decodes: int, queries: int, rest: list[int]
) -> None:
    lengths = [queries] * decodes + rest
    if not lengths:
        return
    whole = batch(lengths)
    first = decodes_of(whole, threshold=4, most=MOST)
    if first is None:
        assert lengths[0] > 4
        return
    second = rest_of(whole, first)
    same = [n == first.queries for n in lengths]
    assert first.queries == lengths[0]
    assert first.requests == (same.index(False) if False in same else len(same))
    assert first.tokens == first.requests * first.queries
    assert torch.equal(first.lengths, whole.seq_lens[: first.requests])
    if second is None:
        assert first.tokens == whole.num_actual_tokens
        return
    assert first.tokens + second.num_actual_tokens == whole.num_actual_tokens
    assert first.requests + second.num_reqs == len(lengths)
    assert torch.equal(second.naive_query_lens(), whole.naive_query_lens()[first.requests :])
    assert int(second.query_start_loc[0]) == int(second.query_start_loc_cpu[0]) == 0
    for name, count in (
        *(("seq_lens", first.requests), ("block_table_tensor", first.requests)),
        *(("slot_mapping", first.tokens), ("positions", first.tokens)),
    ):
        assert torch.equal(getattr(second, name), getattr(whole, name)[count:]), name


def test_what_was_computed_of_the_whole_batch_is_computed_again_of_the_rest() -> None:
    whole = batch([1, 1, 30])
    assert whole.compute_num_computed_tokens().tolist() == [0, 100, 200]
    rest = rest_of(whole, decodes_of(whole, 1, MOST))
    assert rest.compute_num_computed_tokens().tolist() == [200]


def test_every_field_of_a_batch_is_known() -> None:
    """A field that a later vLLM adds must be looked at: whether it is cut, and along what."""
    names = set(CommonAttentionMetadata.__dataclass_fields__)
    from pd_kernels.vllm import batch_split

    cut = {*batch_split._REQUESTS, *batch_split._TOKENS, *batch_split._COMPUTED_LATER}
    changed = {"num_reqs", "num_actual_tokens", "query_start_loc", "query_start_loc_cpu"}
    bounds = {"max_query_len", "max_seq_len", "causal"}
    refused = {"logits_indices_padded", "num_logits_indices", "max_logits_per_req"}
    refused |= {"mm_req_doc_ranges"}
    assert names - cut - changed - bounds - refused == set()


def test_requests_that_pad_a_graph_are_no_decodes() -> None:
    decodes = decodes_of(batch([1, 1, 1], padding=2), 1, MOST)
    assert decodes is not None
    assert decodes.requests == 3
    decodes = decodes_of(batch([3, 3], padding=1), 3, MOST)
    assert decodes is not None
    assert (decodes.requests, decodes.queries) == (2, 3)


def test_decodes_that_a_plan_has_no_room_for_are_left_to_the_stock_backend() -> None:
    """A portion of two tokens across the end of a chunk is two requests of one token for Llama 4."""
    whole = batch([1, 1, 1, 1])
    decodes = decodes_of(whole, 1, most=3)
    assert decodes is not None
    assert (decodes.requests, decodes.tokens) == (3, 3)
    rest = rest_of(whole, decodes)
    assert (rest.num_reqs, rest.num_actual_tokens) == (1, 1)
    assert rest.seq_lens.tolist() == [301]


@pytest.mark.parametrize("causal", [False, torch.tensor([1, 0], dtype=torch.int32)])
def test_a_batch_that_is_not_causal_has_no_decodes(causal: Any) -> None:
    assert decodes_of(batch([1, 1], causal=causal), 1, MOST) is None


H200 = DeviceCapability(9, 0)
GOOD: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": H200,
    "attn_type": "decoder",
}


def test_vllm_finds_nothing_wrong_with_a_layer_of_a_common_model() -> None:
    wanted = {"has_sliding_window": True, "use_kv_connector": True}
    assert PagedFlash.validate_configuration(**GOOD) == []
    assert PagedFlash.validate_configuration(**GOOD, **wanted) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_size": 72}, "head size 72: must be one of"),
        ({"dtype": torch.float32}, "dtype torch.float32: must be one of"),
        ({"kv_cache_dtype": "float16"}, "cache dtype float16: must be that of the model"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cache dtype fp8_e5m2"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        (
            {"head_size": 512, "device_capability": DeviceCapability(8, 9)},
            "head size 512 on compute capability 8.9",
        ),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_adaptive_verification": True}, "query lens mismatch not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
    ],
)
def test_what_the_gpu_backend_cannot_do_vllm_is_told(changed: Any, reason: str) -> None:
    found = PagedFlash.validate_configuration(**GOOD | changed)
    assert any(reason in each for each in found), found


@pytest.mark.parametrize(
    ("ours", "stock"), [(PagedFlash, FlashAttentionBackend), (PagedCpu, CPUAttentionBackend)]
)
def test_pages_keep_their_name_and_form(ours: Any, stock: Any) -> None:
    """Connectors know the layout of pages from the name, and whether that of two engines is the same."""
    assert ours.get_name() == stock.get_name()
    assert ours.supported_kv_cache_layouts() == stock.supported_kv_cache_layouts()
    assert ours.forward_includes_kv_cache_update == stock.forward_includes_kv_cache_update


def test_vllm_031_keeps_decodes_with_a_shared_prefix_in_their_graphs() -> None:
    """It takes full graphs only if no backend wants the prefix, and FlashAttention's builder there says when it does."""
    builder = PagedFlashBuilder.__new__(PagedFlashBuilder)
    assert not builder.use_cascade_attention(common_prefix_len=8192, num_reqs=64)


def test_graphs_are_promised_for_decodes_of_one_length_only() -> None:
    support = PagedFlashBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=["HND", "NHD"])
def test_flash_attentions_pages_are_read_in_either_layout(layout: Any) -> None:
    """The GPU backend's decodes, on a CPU: its pages are views by strides."""
    heads, kv_heads, dim, page = 6, 2, 64, 16
    impl = PagedFlashImpl.__new__(PagedFlashImpl)
    impl.num_heads, impl.head_size, impl.scale = heads, dim, dim**-0.5
    impl.sinks = None
    impl.decodes_with(None, None, None, "auto")
    query, output = torch.randn(2, heads, dim), torch.empty(2, heads, dim)
    common = batch([1, 1])
    common.seq_lens = torch.tensor([20, 5], dtype=torch.int32)
    common.block_table_tensor = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    decodes = decodes_of(common, 1, MOST)
    metadata = PagedMetadata(2, 1, common.query_start_loc, 20, *[torch.empty(0)] * 3, decodes, None)
    new = torch.empty(2, kv_heads, dim)
    for _ in range(2):  # an engine may give its layers another cache, as after its profiling
        kv = torch.randn(4, kv_heads, page, 2 * dim)
        cache = kv
        if layout is KVCacheLayout.LBNHC:  # token before head in memory
            cache = kv.transpose(1, 2).contiguous().transpose(1, 2)
        for _ in range(2):
            output.fill_(torch.nan)
            impl.forward(mock.Mock(), query, new, new, cache, metadata, output)
            for row, (pages, length) in enumerate((([3, 1], 20), ([2], 5))):
                whole = kv[pages].transpose(1, 2).flatten(0, 1)[:length]
                key, value = whole.repeat_interleave(heads // kv_heads, 1).split(dim, -1)
                weights = (torch.einsum("hd,thd->ht", query[row], key) * dim**-0.5).softmax(-1)
                wanted = torch.einsum("ht,thd->hd", weights, value)
                torch.testing.assert_close(output[row], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("scales", "wanted"),
    [
        (([0.5], [2.0], [4.0]), (1.0, 4.0)),
        (([0.5, 0.25], [2.0, 3.0], [4.0, 5.0]), ([1.0, 0.75], [4.0, 5.0])),
    ],
    ids=["for all", "by head"],
)
def test_a_scale_of_queries_in_fp8_is_part_of_the_keys(
    scales: tuple[list[float], ...], wanted: Any
) -> None:
    """As vLLM keeps scales of compressed-tensors: `[1]` or `[kv heads]`, and the largest as a number. Queries that were
    multiplied by `[1]` became float32, which no kernel takes."""
    impl = PagedFlashImpl.__new__(PagedFlashImpl)
    impl.num_heads, impl.head_size, impl.scale = 2, 64, 1.0
    impl.sinks = None
    impl.decodes_with(None, None, None, "fp8")
    layer = mock.Mock()
    for name, scale in zip("qkv", scales, strict=True):
        setattr(layer, f"_{name}_scale", torch.tensor(scale))
        setattr(layer, f"_{name}_scale_float", max(scale))
    query = torch.full((1, 2, 64), 0.5).to(paged_backend.FP8)
    cache = torch.zeros(1, len(scales[0]), 16, 128, dtype=torch.uint8)
    common = batch([1])
    metadata = PagedMetadata(
        1, 1, common.query_start_loc, 1, *[torch.empty(0)] * 3, decodes_of(common, 1, MOST), None
    )
    output = torch.empty(1, 2, 64, dtype=torch.bfloat16)
    with mock.patch.object(paged_backend, "paged_decode") as decode:
        impl.forward(layer, query, query, query, cache, metadata, output)
    (given, keys, *_), named = decode.call_args
    assert torch.equal(given, torch.full((1, 2, 64), 0.5, dtype=torch.bfloat16))
    assert keys.dtype == paged_backend.FP8
    for name, scale in zip(("k_scale", "v_scale"), wanted, strict=True):
        assert torch.as_tensor(named[name]).tolist() == scale


@pytest.mark.parametrize(("version", "refused"), [(2, True), (3, False)])
def test_scales_by_head_are_taken_where_flash_attention_takes_them(
    version: int, refused: bool
) -> None:
    where = "vllm.v1.attention.backends.flash_attn.get_flash_attn_version"
    changed = {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True}
    with mock.patch(where, return_value=version):
        reasons = PagedFlash.validate_configuration(**GOOD | changed)
    assert any("per-head quant scales" in each for each in reasons) == refused


@pytest.fixture
def overrides() -> Any:
    with mock.patch.dict(registry._ATTN_OVERRIDES, clear=True), mock.patch.dict(os.environ):
        os.environ.pop(plugin.MLA_VARIABLE, None)
        yield registry._ATTN_OVERRIDES


def test_on_a_gpu_custom_is_ours_and_nothing_changes_without_it(overrides: Any) -> None:
    with mock.patch.multiple(
        type(current_platform), is_cuda=lambda _: True, is_cpu=lambda _: False
    ):
        plugin.register()
        plugin.register()
    unlike = AttentionBackendEnum.FLASH_ATTN_DIFFKV  # ours where an engine has selected CUSTOM
    assert set(overrides) == {AttentionBackendEnum.CUSTOM, unlike}
    assert AttentionBackendEnum.CUSTOM.get_class() is PagedFlash
    assert unlike.get_class() is FlashAttentionDiffKVBackend
    assert ".".join(PagedFlash.full_cls_name()) == AttentionBackendEnum.CUSTOM.get_path()
