# SPDX-License-Identifier: Apache-2.0
"""Decodes on SGLang's own pools, by its own tables, against torch's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_door.test_sglang_sparse import sparse
from torch.nn.functional import scaled_dot_product_attention

from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.sglang.backend import FixedTables, MlaBackend, PagedBackend, PageTables

DIM, KV_HEADS, HEADS = 16, 2, 6
PAGES = 40
LENGTHS = (1, 15, 16, 17, 64, 65, 130)
PAGE_SIZES = (1, 16, 64)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Step:
    """A batch of decodes: each request's tokens lie in pages of its own, in random order.

    The token that is new has a slot, and its KV is not written yet.
    """

    def __init__(self, page_size: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.page_size = page_size
        self.pages = sum(-(-n // page_size) for n in lengths) + 1
        rows = [
            2 * n + 1 for n in range(len(lengths))
        ]  # of the request pool: not all are in the batch
        self.req_to_token = torch.zeros(2 * len(lengths) + 1, 256, dtype=torch.int32)
        free = (torch.randperm(self.pages - 1) + 1).tolist()  # page 0 is padding
        self.slots = []
        for row, length in zip(rows, lengths, strict=True):
            own = [free.pop() for _ in range(-(-length // page_size))]
            slots = [page * page_size + n for page in own for n in range(page_size)][:length]
            self.req_to_token[row, :length] = torch.tensor(slots)
            self.slots.append(torch.tensor(slots))
        self.batch = SimpleNamespace(
            batch_size=len(lengths),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            out_cache_loc=torch.stack([slots[-1] for slots in self.slots]),
            out_cache_loc_is_physical=True,
            forward_mode=ForwardMode.DECODE,
        )

    @property
    def size(self) -> int:
        """Slots that a pool must have besides its padding."""
        return (self.pages - 1) * self.page_size

    def runner(self, pool: Any, *layers: torch.nn.Module, **changed: Any) -> Any:
        args = {"dcp_size": 1, "tp_size": 1, **changed.pop("server_args", {})}
        return SimpleNamespace(
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            page_size=self.page_size,
            device="cpu",
            dtype=changed.pop("dtype", torch.float32),
            model=torch.nn.ModuleList(layers),
            server_args=SimpleNamespace(**args),
            prefill_attention_backend_str="torch_native",
            spec_algorithm=changed.pop("spec_algorithm", SpeculativeAlgorithm.NONE),
            attention_chunk_size=changed.pop("attention_chunk_size", None),
            **changed,
        )


def layer(**options: Any) -> RadixAttention:
    settings = {"num_kv_heads": KV_HEADS, "layer_id": 0} | options
    return RadixAttention(HEADS, DIM, DIM**-0.5, **settings)


def keys_and_values(step: Step, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        size=step.size,
        page_size=step.page_size,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape).to(dtype).view(buffer.dtype))
    return pool


def latents(step: Step, rank: int = LATENT, dtype: torch.dtype = torch.float32) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(
        size=step.size,
        page_size=step.page_size,
        dtype=dtype,
        kv_lora_rank=rank,
        qk_rope_head_dim=ROPE,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
    )
    random = torch.randn(pool.kv_buffer[0].shape)
    pool.kv_buffer[0].copy_(random.to(dtype).view(pool.kv_buffer[0].dtype))
    return pool


def wanted(
    step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
) -> torch.Tensor:
    """Each request by itself, with torch's attention. `query` is `[requests, heads, dim]`."""
    rows = []
    for one, slots in zip(query, step.slots, strict=True):
        k, v = (cache[slots].transpose(0, 1)[None] for cache in (keys, values))
        rows.append(scaled_dot_product_attention(one[None, :, None], k, v, enable_gqa=True, **how))
    return torch.stack([row[0, :, 0] for row in rows])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_keys_and_values_of_any_page_size_and_ragged_lengths(page_size: int) -> None:
    step, ours = Step(page_size), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(step.runner(pool, ours))
    query = torch.randn(len(LENGTHS), HEADS * DIM)
    new = torch.randn(2, len(LENGTHS), KV_HEADS, DIM)
    backend.init_forward_metadata(step.batch)
    out = backend.forward_decode(query, *new, ours, step.batch)
    assert torch.equal(pool.get_key_buffer(0)[step.batch.out_cache_loc], new[0])
    assert torch.equal(pool.get_value_buffer(0)[step.batch.out_cache_loc], new[1])
    reference = wanted(
        step, query.view(-1, HEADS, DIM), pool.get_key_buffer(0), pool.get_value_buffer(0)
    )
    torch.testing.assert_close(out, reference.flatten(1), **CLOSE)


def test_a_window_and_a_cap_are_sglangs() -> None:
    step, ours = Step(16), layer(sliding_window_size=20, logit_cap=5.0)
    pool = keys_and_values(step)
    backend = PagedBackend(step.runner(pool, ours))
    query = torch.randn(len(LENGTHS), HEADS * DIM)
    backend.init_forward_metadata(step.batch)
    out = backend.forward_decode(query, None, None, ours, step.batch, save_kv_cache=False)
    rows = []
    for one, slots in zip(query.view(-1, HEADS, DIM), step.slots, strict=True):
        k, v = pool.get_key_buffer(0)[slots][-21:], pool.get_value_buffer(0)[slots][-21:]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", one, k) * DIM**-0.5
        rows.append(torch.einsum("ht,thd->hd", (5 * torch.tanh(scores / 5)).softmax(1), v))
    torch.testing.assert_close(out, torch.stack(rows).flatten(1), **CLOSE)


@pytest.mark.parametrize(
    ("page_size", "dtype"), [*((n, torch.float32) for n in PAGE_SIZES), (16, torch.float8_e4m3fn)]
)
def test_latents_of_any_page_size_and_ragged_lengths(page_size: int, dtype: torch.dtype) -> None:
    step, heads = Step(page_size), 4
    ours = RadixAttention(heads, LATENT + ROPE, 192**-0.5, 1, 0, v_head_dim=LATENT)
    pool = latents(step, dtype=dtype)
    backend = MlaBackend(step.runner(pool, ours))
    query = torch.randn(len(LENGTHS), heads * (LATENT + ROPE))
    new = torch.randn(len(LENGTHS), 1, LATENT + ROPE)
    backend.init_forward_metadata(step.batch)
    with get_parallel().override(dcp_enabled=False):  # SGLang's pool asks before it writes
        out = backend.forward_decode(query, new, new[..., :LATENT], ours, step.batch)
    cache = pool.get_key_buffer(0).float()
    assert torch.equal(cache[step.batch.out_cache_loc], new.to(dtype).float())
    shaped = query.view(-1, heads, LATENT + ROPE)
    reference = wanted(step, shaped, cache, cache[..., :LATENT], scale=192**-0.5)
    torch.testing.assert_close(out, reference.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tables_of_cuda_graphs_keep_their_address_and_name_the_same_pages(page_size: int) -> None:
    fixed = FixedTables(16, 256, page_size, "cpu")
    addresses = set()
    for lengths in (LENGTHS, LENGTHS[:3], (200, 3)):
        step = Step(page_size, lengths)
        plain = PageTables.of(step.batch, step.req_to_token, page_size)
        filled = fixed.fill(step.batch, step.req_to_token)
        addresses.add((filled.table.data_ptr(), filled.lengths.data_ptr()))
        assert torch.equal(filled.table[:, : plain.table.shape[1]], plain.table)
        assert filled.lengths.tolist() == list(lengths)
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"server_args": {"enable_unified_memory": True}}, "--enable-unified-memory"),
        ({"server_args": {"dcp_size": 2}}, "--dcp-size 2"),
        ({"dtype": torch.bfloat16}, "--kv-cache-dtype"),
    ],
)
def test_what_an_engine_may_not_have_is_named(changed: dict[str, Any], named: str) -> None:
    step = Step(16)
    with pytest.raises(NotImplementedError, match=named):
        PagedBackend(step.runner(keys_and_values(step), layer(), **changed))


def test_prompts_are_for_another_backend() -> None:
    step = Step(16)
    runner = step.runner(keys_and_values(step), layer())
    runner.prefill_attention_backend_str = "pd_kernels"
    with pytest.raises(NotImplementedError, match="--decode-attention-backend alone"):
        PagedBackend(runner)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"is_cross_attention": True}, "only decoders"),
        ({"logit_cap": 3.0, "logit_capping_method": "clip"}, "soft cap by clip"),
    ],
)
def test_what_a_layer_may_not_have_is_named(options: dict[str, Any], named: str) -> None:
    step = Step(16)
    with pytest.raises(NotImplementedError, match=named):
        PagedBackend(step.runner(keys_and_values(step), layer(**options)))


def test_attention_in_chunks_is_named() -> None:
    """Llama 4: its layers with RoPE were decoded over the whole context."""
    step = Step(16)
    pool = keys_and_values(step)
    layers = layer(use_irope=True), layer()
    with pytest.raises(NotImplementedError, match="attention in chunks of 8192 tokens"):
        PagedBackend(step.runner(pool, *layers, attention_chunk_size=8192))
    PagedBackend(step.runner(pool, layers[1], attention_chunk_size=8192))
    PagedBackend(step.runner(pool, *layers))


def test_queries_in_a_wider_tensor_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be a kernel in each layer. Heads far apart are made dense: a kernel is compiled for their distance, which
    would be another for each number of requests."""
    step, ours = Step(16), layer()
    backend = PagedBackend(step.runner(keys_and_values(step), ours))
    wide = torch.randn(len(LENGTHS), (HEADS + 2 * KV_HEADS) * DIM)
    query = wide[:, : HEADS * DIM]
    apart = query.view(-1, HEADS, DIM).transpose(0, 1).contiguous().transpose(0, 1)
    attend, taken = backend.attend, []
    monkeypatch.setattr(backend, "attend", lambda q, *more: taken.append(q) or attend(q, *more))
    backend.init_forward_metadata(step.batch)
    outs = [
        backend.forward_decode(each, None, None, ours, step.batch)
        for each in (query.contiguous(), query, apart)
    ]
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])
    assert taken[1].data_ptr() == wide.data_ptr()
    assert taken[1].stride() == (wide.shape[1], DIM, 1)
    assert taken[2].is_contiguous()


def test_a_pool_whose_tensors_were_replaced_is_read_anew() -> None:
    """Views of its pages are kept from step to step."""
    step, ours = Step(16), layer()
    pool = keys_and_values(step)
    backend = PagedBackend(step.runner(pool, ours))
    query = torch.randn(len(LENGTHS), HEADS * DIM)
    backend.init_forward_metadata(step.batch)
    before = backend.forward_decode(query, None, None, ours, step.batch)
    assert torch.equal(backend.forward_decode(query, None, None, ours, step.batch), before)
    pool.v_buffer[0] = 2 * pool.v_buffer[0]
    after = backend.forward_decode(query, None, None, ours, step.batch)
    torch.testing.assert_close(after, 2 * before)


def test_plans_have_room_for_batches_that_sglang_pads() -> None:
    """With `--enable-dp-attention` a batch is padded to a multiple of ranks, and so is the largest
    CUDA graph."""
    step, ours = Step(16), layer()
    backend = PagedBackend(step.runner(keys_and_values(step), ours, server_args={"tp_size": 8}))
    requests = len(step.req_to_token) - 1  # one row is padding
    assert backend.make_plan(ours).room >= -(-requests // 8) * 8
    backend.init_cuda_graph_state(max_bs=512, max_num_tokens=512)
    assert backend.make_plan(ours).room >= 512


def test_a_cache_in_another_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine started, and ended with its first decode."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    step = Step(16)
    pool = keys_and_values(step)
    with pytest.raises(NotImplementedError, match="layout hnd: must be nhd"):
        PagedBackend(step.runner(pool, layer()))


def test_a_cache_with_scales_of_its_own_is_named() -> None:
    """Such as SGLang's MXFP8 pool, a kind of `MHATokenToKVPool`: its elements alone are not the values."""

    class Scaled(MHATokenToKVPool):
        pass

    step = Step(16)
    pool = keys_and_values(step, torch.float8_e4m3fn)
    pool.__class__ = Scaled
    with pytest.raises(NotImplementedError, match="of kind Scaled"):
        PagedBackend(step.runner(pool, layer()))


def test_latents_of_another_size_are_named() -> None:
    step = Step(16)
    with pytest.raises(NotImplementedError, match="latents of 256"):
        MlaBackend(step.runner(latents(step, 256)))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_sparse_attention_is_named(fp8: bool) -> None:
    step = Step(64)
    with pytest.raises(NotImplementedError, match=r"sparse attention .* --dsa-decode-backend"):
        MlaBackend(step.runner(sparse(fp8=fp8), dtype=torch.bfloat16))


def test_sinks_beside_latents_are_named_at_start() -> None:
    """As in Hunyuan V4, whose layers get them with each call; the first decode ended the engine."""

    class Attention(torch.nn.Module):
        def __init__(self, sinks: bool) -> None:
            super().__init__()
            self.attn_mqa = layer()
            self.sinkhorn_rounds = 3
            if sinks:
                self.learnable_sink_param = torch.nn.Parameter(torch.zeros(HEADS))

    step = Step(16)
    MlaBackend(step.runner(latents(step), Attention(sinks=False)))
    PagedBackend(step.runner(keys_and_values(step), Attention(sinks=True)))
    with pytest.raises(NotImplementedError, match=r"sinks \(learnable_sink_param\) with MLA"):
        MlaBackend(step.runner(latents(step), Attention(sinks=True)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window_size": 127}, "sliding window of 128 tokens with MLA"),
        ({"logit_cap": 30.0}, "a soft cap of 30 with MLA"),
        ({"is_cross_attention": True}, "only decoders"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "only decoders"),
        ({"use_irope": True}, "attention in chunks of 8192 tokens"),
    ],
)
def test_what_mla_decode_has_not_is_named_at_start(options: dict[str, Any], named: str) -> None:
    """As the windows of dots3-note, which were left out: its layers saw all tokens."""
    step = Step(16)
    with pytest.raises(NotImplementedError, match=named):
        MlaBackend(step.runner(latents(step), layer(), layer(**options), attention_chunk_size=8192))


def test_latents_that_are_divided_by_scales_are_named() -> None:
    step, scaled = Step(16), layer()
    MlaBackend(step.runner(latents(step), scaled))
    scaled.k_scale_float = 0.5
    with pytest.raises(NotImplementedError, match=r"KV scales \(0.5\)"):
        MlaBackend(step.runner(latents(step), scaled))


@pytest.mark.parametrize(
    ("capability", "named"),
    [
        (
            (8, 0),
            ("MLA on compute capability 8.0", "an FP8 cache on compute capability 8.0: needs 8.9"),
        ),
        ((12, 0), ("MLA on compute capability 12.0",)),
        ((9, 0), ()),
    ],
)
def test_a_gpu_that_cannot_run_the_kernels_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    step = Step(16)
    pool = latents(step, dtype=torch.float8_e4m3fn)
    backend = MlaBackend(step.runner(pool, dtype=torch.bfloat16))
    told = "; ".join(backend.refusals(on_gpu=True))
    assert all(each in told for each in named)
    assert bool(told) == bool(named)
    wide = RadixAttention(HEADS, 512, 512**-0.5, num_kv_heads=KV_HEADS, layer_id=0)
    paged = PagedBackend(step.runner(keys_and_values(step), wide))
    told = "; ".join(paged.refusals(on_gpu=True))
    assert ("head size 512 on compute capability" in told) == bool(named)


def test_sinks_take_a_part_of_each_softmax() -> None:
    step, ours = Step(16), layer()
    backend = PagedBackend(step.runner(keys_and_values(step), ours))
    backend.init_forward_metadata(step.batch)
    query = torch.randn(len(LENGTHS), HEADS * DIM)
    given = query, None, None, ours, step.batch, False
    plain = backend.forward_decode(*given)
    assert torch.equal(
        backend.forward_decode(*given, sinks=torch.full((HEADS,), -torch.inf)), plain
    )
    least = backend.forward_decode(*given, sinks=torch.full((HEADS,), 30.0))
    assert least.abs().max() < 1e-6 < plain.abs().max()
    with pytest.raises(NotImplementedError, match="k_rope"):
        backend.forward_decode(*given, k_rope=query)
