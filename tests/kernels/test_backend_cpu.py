# SPDX-License-Identifier: Apache-2.0
"""Layers that decode with paged_decode compute what CPU_ATTN's do, on CPU_ATTN's own pages.

vLLM's layers, builders and operations are the real ones; only the engine around them is missing.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from pd_kernels.tuning import tuned
from pd_kernels.vllm import paged_backend, plugin
from pd_kernels.vllm.paged_cpu import PagedCpu, PagedCpuImpl

MODEL = Path(__file__).parents[2] / "pd_connector" / "tools" / "demo" / "model"
PAGE, PAGES = 32, 40
NAME = "model.layers.0.attn"

# Another order of summation, in the layer's dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

DECODES = ((1, 70), (1, 1), (1, 33), (1, 32), (1, 200))
MIXED = (*DECODES, (20, 20), (7, 90), (64, 130))
PREFILLS = ((20, 20), (7, 90))
VERIFIED = ((4, 70), (4, 4), (4, 33), (1, 50), (30, 60))
"""Each request's new tokens, and all of its tokens."""

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted")


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with mock.patch.dict(os.environ), mock.patch.dict(registry._ATTN_OVERRIDES):
        os.environ.pop(plugin.MLA_VARIABLE, None)
        plugin.register()
        yield


@dataclass(frozen=True)
class Shape:
    """The shape of a layer."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: str = "auto"
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    shared: bool = False  # its KV is another layer's: it gets no new keys and values

    def layer(self, backend: str | None) -> "Layer":
        """An attention layer as vLLM makes it for `--attention-backend`."""
        config = EngineArgs(
            model=str(MODEL),
            dtype=str(self.dtype).removeprefix("torch."),
            kv_cache_dtype=self.cache_dtype,
            block_size=PAGE,
            max_model_len=512,
            enforce_eager=True,
            attention_backend=backend,
        ).create_engine_config()
        extra = {"sinks": torch.zeros(self.heads)} if self.sinks else {}
        slopes = [2.0**-n for n in range(1, self.heads + 1)] if self.alibi else None
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(config):
                module = Attention(
                    *(self.heads, self.dim, self.dim**-0.5, self.kv_heads, slopes),
                    cache_config=config.cache_config,
                    logits_soft_cap=self.soft_cap,
                    per_layer_sliding_window=self.window,
                    prefix=NAME,
                    **extra,
                )
                return Layer(module, config)
        finally:
            torch.set_default_dtype(before)


class Layer:
    """A layer with its builder, to run batches through."""

    def __init__(self, module: Any, config: Any) -> None:
        self.module, spec = module, module.get_kv_cache_spec(config)
        made = module.attn_backend.get_builder_cls()
        self.builder = made(spec, [NAME], config, torch.device("cpu"))

    def forward(self, batch: "Batch") -> torch.Tensor:
        """Attention of a batch, `[token, heads, dim]`."""
        shape, module = batch.shape, self.module
        stored = torch.uint8 if shape.cache_dtype != "auto" else shape.dtype
        cache = torch.zeros(PAGES, shape.kv_heads, PAGE, 2 * shape.dim, dtype=stored)
        metadata = self.builder.build(0, batch.common())
        for row, tokens in enumerate(batch.tokens):
            kv = batch.kv[:, row, :tokens].unbind()
            module.impl.do_kv_cache_update(module, *kv, cache, batch.slots(row)[:tokens])
        output = torch.full_like(batch.query, torch.nan)
        new = (None, None) if shape.shared else batch.new_kv()
        module.impl.forward(*(module, batch.query, *new, cache, metadata), output=output)
        return output


class Batch:
    """Random requests of these new and total tokens, in pages that lie in no order."""

    def __init__(self, shape: Shape, requests: tuple[tuple[int, int], ...]) -> None:
        chance = torch.Generator().manual_seed(len(requests))
        self.shape = shape
        self.queries, self.tokens = zip(*requests, strict=True)
        most = -(-max(self.tokens) // PAGE)
        pages = torch.randperm(PAGES - 1, generator=chance) + 1
        self.table = torch.zeros(len(requests), most, dtype=torch.int32)
        for row, tokens in enumerate(self.tokens):
            used = -(-tokens // PAGE)
            self.table[row, :used], pages = pages[:used], pages[used:]

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, shape.dim, generator=chance).to(shape.dtype)

        self.kv = random(2, len(requests), max(self.tokens), shape.kv_heads)
        self.query = random(sum(self.queries), shape.heads)

    def slots(self, row: int) -> torch.Tensor:
        pages = self.table[row].long().repeat_interleave(PAGE)
        return pages * PAGE + torch.arange(len(pages)) % PAGE

    def new(self, of_row: Callable[[int], torch.Tensor], axis: int) -> torch.Tensor:
        """Of what each row has for all of its tokens, the part of the new ones."""
        rows = []
        for row, (queries, tokens) in enumerate(zip(self.queries, self.tokens, strict=True)):
            rows.append(of_row(row).narrow(axis, tokens - queries, queries))
        return torch.cat(rows, axis)

    def new_kv(self) -> tuple[torch.Tensor, ...]:
        return self.new(lambda row: self.kv[:, row], 1).unbind()

    def common(self) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *self.queries]).cumsum(0).int()
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.tokens, dtype=torch.int32),
            num_reqs=len(self.queries),
            num_actual_tokens=len(self.query),
            max_query_len=max(self.queries),
            max_seq_len=max(self.tokens),
            block_table_tensor=self.table,
            slot_mapping=self.new(self.slots, 0),
        )


def distance(shape: Shape, batch: Batch, threshold: int = 1) -> float:
    ours, theirs = shape.layer("CUSTOM"), shape.layer(None)
    ours.builder.reorder_batch_threshold = threshold
    found, wanted = ours.forward(batch), theirs.forward(batch)
    return float((found.float() - wanted.float()).abs().max())


@pytest.mark.parametrize(
    "requests", [DECODES, MIXED, PREFILLS], ids=["decodes", "decodes and prefills", "prefills"]
)
def test_any_batch_gives_what_the_stock_backend_gives(requests: Any) -> None:
    shape = Shape()
    assert distance(shape, Batch(shape, requests)) <= TOLERANCE[shape.dtype]


SHAPES = {
    "as many KV heads as heads": Shape(heads=4, kv_heads=4),
    "one KV head": Shape(heads=7, kv_heads=1),
    "groups of five": Shape(heads=10, kv_heads=2),
    "a head size of 128": Shape(dim=128),
    "a head size of 80": Shape(dim=80),
    "a sliding window": Shape(window=40),
    "a soft cap": Shape(soft_cap=5.0),
    "a window and a soft cap": Shape(window=40, soft_cap=5.0),
    "ALiBi": Shape(alibi=True),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "an FP8 cache": Shape(cache_dtype="fp8"),
    "the KV of another layer": Shape(shared=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_any_layer_gives_what_the_stock_backend_gives(shape: Shape) -> None:
    assert distance(shape, Batch(shape, MIXED)) <= TOLERANCE[shape.dtype]


def test_several_tokens_of_a_request_are_verified_as_a_decode() -> None:
    shape = Shape()
    with mock.patch.object(
        paged_backend, "paged_decode", wraps=paged_backend.paged_decode
    ) as decode:
        assert distance(shape, Batch(shape, VERIFIED), threshold=4) <= TOLERANCE[shape.dtype]
    assert decode.call_args.args[0].shape == (3, 4, shape.heads, shape.dim)


def test_decodes_are_ours_and_prefills_are_not() -> None:
    """Without this, all of the above would hold for a backend that delegates everything."""
    shape = Shape()
    layer, batch = shape.layer("CUSTOM"), Batch(shape, MIXED)
    theirs = CPUAttentionBackendImpl.forward
    rests: list[Any] = []

    def spied(self: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        rests.append(query.shape[0])
        return theirs(self, module, query, *args, **kwargs)

    with (
        mock.patch.object(
            paged_backend, "paged_decode", wraps=paged_backend.paged_decode
        ) as decode,
        mock.patch.object(CPUAttentionBackendImpl, "forward", spied),
    ):
        layer.forward(batch)
    assert [call.args[0].shape[0] for call in decode.call_args_list] == [len(DECODES)]
    assert rests == [sum(queries for queries, _ in MIXED) - len(DECODES)]


MIXING = {
    "plain": Shape(),
    "a sliding window": Shape(window=40),
    "groups of five": Shape(heads=10, kv_heads=2),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "an FP8 cache": Shape(cache_dtype="fp8"),
}


@pytest.mark.parametrize("shape", MIXING.values(), ids=list(MIXING))
@pytest.mark.parametrize("requests", [MIXED, VERIFIED], ids=["decodes", "verified"])
def test_prefill_chunks_and_decodes_in_one_launch_give_the_same(
    shape: Shape, requests: Any
) -> None:
    """Where it is chosen (`Tuning.mixed_steps`). Neither of the two kernels of before is called."""
    mixed, theirs = mock.Mock(wraps=paged_backend.mixed_attention), mock.Mock()
    batch = Batch(shape, requests)
    layer, stock = shape.layer("CUSTOM"), shape.layer(None)
    layer.builder.reorder_batch_threshold = 4 if requests is VERIFIED else 1
    wanted = stock.forward(batch)
    with (
        tuned(mixed_steps=True),
        mock.patch.object(paged_backend, "mixed_attention", mixed),
        mock.patch.object(paged_backend, "paged_decode", theirs),
        mock.patch.object(CPUAttentionBackendImpl, "forward", theirs),
    ):
        found = layer.forward(batch)
    assert mixed.call_count == 1
    assert not theirs.called
    assert float((found.float() - wanted.float()).abs().max()) <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize(
    ("shape", "requests", "chosen"),
    [
        (Shape(), MIXED, False),
        (Shape(), DECODES, True),
        (Shape(), PREFILLS, True),
        (Shape(soft_cap=5.0), MIXED, True),
        (Shape(alibi=True), MIXED, True),
    ],
    ids=["not chosen", "decodes alone", "prefills alone", "a soft cap", "ALiBi"],
)
def test_steps_that_are_not_for_one_launch_are_cut_in_two(
    shape: Shape, requests: Any, chosen: bool
) -> None:
    builder = shape.layer("CUSTOM").builder
    with tuned(mixed_steps=chosen):
        metadata = builder.build(0, Batch(shape, requests).common())
    assert not metadata.mixed
    assert (metadata.rest is None) == (requests is DECODES)


def test_a_step_is_planned_once_for_all_layers_with_one_window() -> None:
    """As on a GPU, which a device without memory stands for."""
    shape = Shape()
    layer, batch = shape.layer("CUSTOM"), Batch(shape, DECODES)
    builder = layer.builder
    windowed = Shape(window=40).layer("CUSTOM").module
    builder._layers = [layer.module, windowed, layer.module]
    builder.device = torch.device("meta")
    with mock.patch.object(
        paged_backend, "plan_paged_decode", side_effect=lambda *_, **__: mock.Mock()
    ) as plan:
        steps = [builder.build(0, batch.common()) for _ in range(2)]
    metadata = steps[-1]
    assert set(metadata.plans) == {(0, shape.heads), (40, shape.heads)}
    for allocated in builder._allocated[1].values():
        assert allocated.fill.call_count == len(steps)
        assert torch.equal(allocated.fill.call_args.args[0], batch.common().seq_lens)
    assert [call.kwargs["window"] for call in plan.call_args_list] == [0, 40]  # once, for graphs
    assert plan.call_args.args[0].shape == (1, 1, shape.heads, shape.dim)
    with mock.patch.object(paged_backend, "paged_decode") as decode:
        for module in (layer.module, windowed):
            new, output = torch.empty(5, 2, 64), torch.empty_like(batch.query)
            cache = torch.zeros(PAGES, 2, PAGE, 128)
            module.impl.forward(module, batch.query, new, new, cache, metadata, output)
            used = decode.call_args.kwargs["plan"]
            assert used is metadata.plans[module.impl.window, shape.heads]


def test_a_batch_that_is_not_causal_is_left_to_the_stock_backend() -> None:
    common = Batch(Shape(), DECODES).common().replace(causal=False)
    metadata = Shape().layer("CUSTOM").builder.build(0, common)
    assert metadata.decodes is None
    assert metadata.rest.num_actual_tokens == len(DECODES)


def test_a_wrong_page_is_noticed() -> None:
    """The negative control of every comparison here."""
    shape = Shape()
    layer, batch = shape.layer("CUSTOM"), Batch(shape, DECODES)
    stored, common = layer.forward(batch), batch.common()
    common.block_table_tensor = common.block_table_tensor.clone()
    common.block_table_tensor[0] = common.block_table_tensor[0].roll(1)
    with mock.patch.object(batch, "common", return_value=common):
        found = layer.forward(batch)
    assert float((found[0] - stored[0]).abs().max()) > 1000 * TOLERANCE[shape.dtype]
    assert torch.equal(found[1:], stored[1:])


def test_only_an_engine_that_selects_custom_gets_our_backend() -> None:
    ours = Shape().layer("CUSTOM").module
    assert (type(ours.impl), ours.attn_backend) == (PagedCpuImpl, PagedCpu)
    for backend in (None, "CPU_ATTN"):
        assert type(Shape().layer(backend).module.impl) is CPUAttentionBackendImpl


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(sinks=True), "attention sinks"),
        (Shape(alibi=True, soft_cap=3.0), "ALiBi together with a soft cap"),
        (Shape(dim=48), "head size 48: must be one of"),
        (Shape(cache_dtype="fp8_e5m2"), "cache dtype fp8_e5m2: must be that of the model"),
    ],
)
def test_what_paged_decode_cannot_do_is_refused_by_name(shape: Shape, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        shape.layer("CUSTOM")
