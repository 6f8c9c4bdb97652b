# SPDX-License-Identifier: Apache-2.0
"""Layers that decode with paged_decode compute what CPU_ATTN's do, on CPU_ATTN's own pages.

vLLM's layers, builders and operations are the real ones; only the engine around them is missing.
"""

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from backend_layers import DECODES, MIXED, PAGE, PAGES, PREFILLS, TOLERANCE, VERIFIED, Batch, Shape
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from pd_kernels.vllm import paged_backend, paged_builder
from pd_kernels.vllm.paged_cpu import PagedCpu, PagedCpuImpl

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted"),
    pytest.mark.usefixtures("registered_backends"),
]


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
    "sinks": Shape(sinks=True),
    "sinks and a window": Shape(sinks=True, window=40, dtype=torch.bfloat16),
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


def test_a_step_is_planned_once_for_all_layers_with_one_window() -> None:
    """As on a GPU, which a device without memory stands for."""
    shape = Shape()
    layer, batch = shape.layer("CUSTOM"), Batch(shape, DECODES)
    builder = layer.builder
    windowed = Shape(window=40).layer("CUSTOM").module
    builder._layers = [layer.module, windowed, layer.module]
    builder.device = torch.device("meta")
    with mock.patch.object(
        paged_builder, "plan_paged_decode", side_effect=lambda *_, **__: mock.Mock()
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
        (Shape(alibi=True, soft_cap=3.0), "ALiBi together with a soft cap"),
        (Shape(dim=48), "head size 48: must be one of"),
        (Shape(cache_dtype="fp8_e5m2"), "cache dtype fp8_e5m2: must be that of the model"),
    ],
)
def test_what_paged_decode_cannot_do_is_refused_by_name(shape: Shape, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        shape.layer("CUSTOM")
