# SPDX-License-Identifier: Apache-2.0
"""Prefill chunks and decodes in one launch: the kernel, interpreted, against attention in
float32."""

from collections.abc import Iterator
from typing import Any

import decode_interpreted
import pytest
import torch
import triton.language as tl
from decode_batches import FP8, error, paged_batch

from pd_kernels.attention import MixedPlan, mixed, mixed_attention
from pd_kernels.attention.mixed_kernel import claim, launch_mixed, leave
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.reference import reference_paged_decode

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mixed, "multiprocessors", lambda _: 3)
    with decode_interpreted.dots_mended():
        yield


def step(
    decodes: dict[int, int], prefills: dict[int, int], **others: Any
) -> tuple[MixedPlan, dict[str, Any]]:
    """A plan for sequences of these lengths, each with its number of queries, and a layer's arguments."""
    counts = [*decodes.values(), *prefills.values()]
    window = others.pop("window", 0)
    batch = paged_batch([*decodes, *prefills], **others)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    source = torch.Generator().manual_seed(7)
    query = torch.randn(starts[-1], *batch.query.shape[2:], generator=source).to(batch.query.dtype)
    tables = batch.table, batch.lengths, starts, len(decodes), window
    plan = MixedPlan.of(query, batch.keys, *tables, v_cache=batch.values)
    names = ("keys", "values", "scale", "key_scale", "value_scale", "sinks", "head_scales")
    return plan, {"query": query.unsqueeze(1), **{name: getattr(batch, name) for name in names}}


def by_reference(call: PagedCall) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (
        torch.full((*call.query.shape[:3], call.width), 7.0),
        torch.full(call.query.shape[:3], 7.0),
    )
    reference_paged_decode(call, out, lse)
    return out, lse


def check(plan: MixedPlan, layer: dict[str, Any]) -> None:
    """Twice over one plan: tickets and counters are zero again after a launch."""
    wanted, sums = by_reference(plan.whole(**layer))
    for _ in range(2):
        out, lse = torch.full(wanted.shape, 7.0), torch.full(sums.shape, 7.0)
        prefill, decode = plan.calls(**layer)
        launch_mixed(prefill, decode, plan.plans, plan.tickets, out, lse, sm_aware=False)
        assert not plan.tickets.any()
        assert not any(each.counters.any() for each in plan.plans)
        assert error(out, wanted) <= BOUND
        assert torch.allclose(lse, sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"window": 90},
        {"cache": FP8},
        {"cache": FP8, "head_scales": (torch.tensor([0.3, 2.0]), torch.tensor([4.0, 0.5]))},
        {"heads": 8, "kv_heads": 1},
        {"dim": 80, "page": 48},
        {"sinks": torch.tensor([0.5, -torch.inf, 6.0, 2.0]), "value_dim": 96},
    ],
    ids=[
        "plain",
        "window",
        "fp8",
        "fp8 by head",
        "group of 8",
        "dim 80",
        "sinks, values of another dim",
    ],
)
def test_both_kinds_equal_the_reference(others: dict[str, Any]) -> None:
    check(*step({300: 1, 40: 3}, {150: 70, 33: 33}, **others))


def test_several_of_each_kind() -> None:
    check(*step({130: 1, 20: 2, 7: 1}, {90: 40, 65: 1}))


@pytest.mark.parametrize(("prefills", "decodes"), [(4, 4), (1, 7), (7, 1), (3, 4)])
def test_every_program_of_either_kind_is_claimed_once(prefills: int, decodes: int) -> None:
    """A multiprocessor that runs two programs has one of each kind while both are left."""
    processors = 4
    tickets = torch.zeros(processors + 3, dtype=torch.int32)
    found = torch.full((prefills + decodes, 2), -1, dtype=torch.int32)
    claims[(prefills + decodes,)](tickets, found, prefills, decodes, processors)
    kinds = {kind: sorted(n for k, n in found.tolist() if k == kind) for kind in (0, 1)}
    assert kinds == {0: list(range(prefills)), 1: list(range(decodes))}
    assert not tickets.any()
    if prefills == decodes == processors:
        pairs = zip(found[:processors, 0].tolist(), found[processors:, 0].tolist(), strict=True)
        assert all(sorted(pair) == [0, 1] for pair in pairs)


def _claims(tickets, found, prefills, decodes, processors):  # type: ignore[no-untyped-def]
    kind, number = claim(tickets, prefills, decodes, processors, False)
    tl.store(found + 2 * tl.program_id(0), kind)
    tl.store(found + 2 * tl.program_id(0) + 1, number)
    leave(tickets, prefills + decodes, processors)


claims = decode_interpreted.InterpretedFunction(_claims)


def test_on_a_cpu_the_reference_answers() -> None:
    plan, layer = step({300: 1}, {150: 70})
    query = layer["query"][:, 0]
    out = mixed_attention(query, layer["keys"], layer["values"], plan, scale=layer["scale"])
    wanted, _ = by_reference(plan.whole(**layer))
    assert torch.equal(out, wanted[:, 0].to(out.dtype))


def test_what_the_plan_was_not_made_for_is_refused() -> None:
    plan, layer = step({300: 1}, {150: 70})
    query, caches = layer["query"][:, 0], (layer["keys"], layer["values"])
    with pytest.raises(ValueError, match="q of 70 tokens: the plan was made for 71"):
        mixed_attention(query[1:], *caches, plan)
    with pytest.raises(ValueError, match=r"out \[71, 4, 64\]: must be dense"):
        mixed_attention(
            query, *caches, plan, out=query.transpose(0, 1).contiguous().transpose(0, 1)
        )
    with pytest.raises(ValueError, match="plan for"):
        mixed_attention(query.repeat(1, 4, 1), *caches, plan)


def test_a_step_of_one_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="2 decodes of 2 sequences: must be"):
        step({300: 1, 40: 1}, {})
