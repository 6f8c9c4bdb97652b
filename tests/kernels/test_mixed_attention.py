# SPDX-License-Identifier: Apache-2.0
"""Prefill chunks and decodes in one launch: the kernel, interpreted, against attention in
float32."""

import warnings
from collections.abc import Iterator
from typing import Any

import decode_interpreted
import pytest
import torch
import triton.language as tl
from decode_batches import FP8, error, paged_batch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pd_kernels.attention import (
    MixedPlan,
    Mod,
    decode_call,
    mixed_attention,
    mixed_kernel,
    soft_cap,
)
from pd_kernels.attention.mixed_kernel import claim, launch_mixed, leave
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.reference import reference_paged_decode

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (decode_call, mixed_kernel):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 3)
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
        told = plan.plans, plan.tickets, out, lse
        launch_mixed(prefill, decode, *told, sm_aware=False, owners=plan.owner)
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


def _tilted(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return score - args[0] * (b + 1) * (h + 1) * (q_idx - kv_idx)


def _striped(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return ((q_idx - kv_idx) % (b + args[0]) == 0) | (kv_idx + h + 3 > q_idx)


TILTED, STRIPED = Mod.of(_tilted, (0.003,)), Mod.of(_striped, (2,))
MODS = {
    "score": {"score_mod": TILTED},
    "mask": {"mask_mod": STRIPED},
    "both": {"score_mod": TILTED, "mask_mod": STRIPED},
    "soft cap": {"score_mod": soft_cap(3.0)},
    "soft cap and mask": {"score_mod": soft_cap(3.0), "mask_mod": STRIPED},
}


def by_flex_attention(plan: MixedPlan, layer: dict[str, Any], window: int = 0) -> torch.Tensor:
    """Each sequence by itself, with torch's FlexAttention in float32: its score mods have five arguments, of which the index of
    the query counts from the chunk's first token."""
    call, rows = plan.whole(**layer), []
    score, mask = call.score_mod, call.mask_mod
    for number, length in enumerate(call.lengths.tolist()):
        q = call.query[call.own_queries(number)][:, 0].float()
        first, page = length - len(q), call.keys.shape[1]
        where = torch.arange(length)
        where = call.table[number, where // page].long(), where % page
        k, v = (each[where].float() for each in (call.keys, call.values))
        k, v = k * call.key_scale, v * call.value_scale

        def own_score(s, b, h, q_idx, kv_idx, number=number, first=first):  # type: ignore[no-untyped-def]
            own = torch.tensor(number)
            return score.reference(s, own, h, q_idx + first, kv_idx, score.args) if score else s

        def own_mask(b, h, q_idx, kv_idx, number=number, first=first):  # type: ignore[no-untyped-def]
            seen = kv_idx <= q_idx + first
            seen = seen & (kv_idx > q_idx + first - window) if window else seen
            own = torch.tensor(number), h, q_idx + first, kv_idx
            return seen & mask.reference(*own, mask.args) if mask else seen

        block = create_block_mask(own_mask, None, q.shape[1], len(q), length, device="cpu")
        told = (each.transpose(0, 1)[None] for each in (q, k, v))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks to be compiled
            row = flex_attention(
                *told, own_score, block_mask=block, scale=call.scale, enable_gqa=True
            )
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)[:, None]


@pytest.mark.parametrize("mods", MODS.values(), ids=list(MODS))
@pytest.mark.parametrize(
    "others", [{}, {"cache": FP8}, {"window": 40}], ids=["plain", "fp8", "window"]
)
def test_mods_are_those_of_flex_attention(mods: dict[str, Mod], others: dict[str, Any]) -> None:
    """A chunk of several parts is one sequence for a mod, the third and the fourth of the step."""
    plan, layer = step({130: 1, 40: 3}, {150: 70, 33: 33}, **others)
    layer |= mods
    wanted = by_flex_attention(plan, layer, others.get("window", 0))
    assert error(by_reference(plan.whole(**layer))[0], wanted) <= 1e-5
    check(plan, layer)


def test_parts_that_are_taken_for_sequences_are_noticed() -> None:
    plan, layer = step({130: 1, 40: 3}, {150: 70, 33: 33})
    layer |= MODS["both"]
    wanted = by_flex_attention(plan, layer)
    for owners, right in ((plan.owner, True), (torch.arange(len(plan.owner)), False)):
        out = torch.full(wanted.shape, 7.0)
        told = plan.plans, plan.tickets, out, None
        launch_mixed(*plan.calls(**layer), *told, sm_aware=False, owners=owners)
        assert (error(out, wanted) <= BOUND) == right


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
    for mods in ({}, MODS["both"]):
        told = layer["query"][:, 0], layer["keys"], layer["values"], plan
        out = mixed_attention(*told, scale=layer["scale"], **mods)
        wanted, _ = by_reference(plan.whole(**layer, **mods))
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
    with pytest.raises(ValueError, match="score_mod: its function must have the parameters"):
        mixed_attention(query, *caches, plan, score_mod=STRIPED)
    with pytest.raises(ValueError, match="plan for"):
        mixed_attention(query.repeat(1, 4, 1), *caches, plan)


def test_a_step_whose_prefills_have_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens behind the 1 decodes: must be"):
        step({300: 1}, {40: 0})


def test_a_step_of_one_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="2 decodes of 2 sequences: must be"):
        step({300: 1, 40: 1}, {})
