# SPDX-License-Identifier: Apache-2.0
"""Steps with prefill chunks and decodes in one launch, where that is chosen, give what the stock
backend gives."""

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from backend_layers import DECODES, MIXED, PREFILLS, TOLERANCE, VERIFIED, Batch, Shape
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from pd_kernels.tuning import tuned
from pd_kernels.vllm import paged_backend

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted"),
    pytest.mark.usefixtures("registered_backends"),
]


MIXING = {
    "plain": Shape(),
    "a sliding window": Shape(window=40),
    "groups of five": Shape(heads=10, kv_heads=2),
    "sinks": Shape(sinks=True),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "an FP8 cache": Shape(cache_dtype="fp8"),
    "a soft cap": Shape(soft_cap=5.0),
    "ALiBi": Shape(alibi=True),
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
    ],
    ids=["not chosen", "decodes alone", "prefills alone"],
)
def test_steps_that_are_not_for_one_launch_are_cut_in_two(
    shape: Shape, requests: Any, chosen: bool
) -> None:
    builder = shape.layer("CUSTOM").builder
    with tuned(mixed_steps=chosen):
        metadata = builder.build(0, Batch(shape, requests).common())
    assert not metadata.mixed
    assert (metadata.rest is None) == (requests is DECODES)
