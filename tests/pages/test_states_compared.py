# SPDX-License-Identifier: Apache-2.0
"""States in an audit: what came is compared with what this engine has computed, section by section."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.state_caches import mamba2

from pd_connector.codec import DTYPES
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Shard, state_group
from pd_connector.pages.paged_cache import PagedCache, StatePages
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes
from pd_connector.protocol.consuming.audit import Comparison

SECTIONS = mamba2(heads=8, groups=2)
LAYERS = (0, 2)
PAGE, POSITION = 1, 96

Rank = tuple[PagedCache, dict[int, dict[str, torch.Tensor]]]


def rank(tp_rank: int = 0, tp_size: int = 1, scratch: int = 0) -> Rank:
    """A cache with the states of one prompt, and its views by layer and section."""
    torch.manual_seed(0)
    shard = Shard(0, 3, tp_rank, tp_size)
    views: dict[int, dict[str, torch.Tensor]] = {}
    for layer in LAYERS:
        views[layer] = {}
        for section in SECTIONS:
            whole = torch.randn(3, section.units, section.rows, section.dim)
            own = whole[:, list(shard.heads(section.units))].to(DTYPES[section.dtype])
            views[layer][section.name] = own.contiguous()
    states = {layer: StatePages(tuple(found.values()), scratch) for layer, found in views.items()}
    return PagedCache(states, Geometry(shard, (state_group(LAYERS, SECTIONS),))), views


def audit(sources: list[Rank], destination: Rank) -> tuple[Cause, str] | None:
    comparison, every = Comparison(states=True), []
    for source, _ in sources:
        pair = routes(source.geometry, destination[0].geometry, ("raw",), ("raw",))
        every += pair
        for chunk in plan(pair, 0, 0, 4096, state_token=POSITION):
            route = pair[chunk.route]
            slot = memoryview(bytearray(chunk.nbytes(route)))
            payload = source.gather(route, chunk, [PAGE], slot)
            before = {n: [v.clone() for v in s.values()] for n, s in destination[1].items()}
            found = destination[0].compare(route, chunk, [PAGE], payload)
            for layer, views in destination[1].items():
                same = zip(views.values(), before[layer], strict=True)
                assert all(torch.equal(a, b) for a, b in same), "nothing is written"
            comparison.note(route, found)
    return comparison.judge([], every)


@pytest.mark.parametrize(("there", "here"), [(1, 1), (2, 1), (1, 2), (4, 1)])
def test_equal_states_pass_between_any_numbers_of_ranks(there: int, here: int) -> None:
    sources = [rank(each, there) for each in range(there)]
    for each in range(here):
        assert audit(sources, rank(each, here)) is None


def _swap(views: dict[int, dict[str, torch.Tensor]]) -> None:
    b, c = views[2]["conv.b"], views[2]["conv.c"]
    kept = b.clone()
    b.copy_(c)
    c.copy_(kept)


def _zero(views: dict[int, dict[str, torch.Tensor]]) -> None:
    for sections in views.values():
        for view in sections.values():
            view.zero_()


def _one_unit(views: dict[int, dict[str, torch.Tensor]]) -> None:
    views[2]["ssm"][PAGE, 5].neg_()


def _another_page(views: dict[int, dict[str, torch.Tensor]]) -> None:
    for view in views[2].values():
        view[PAGE].copy_(view[PAGE + 1].clone())


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (_swap, "layer 2, conv.b of the state"),
        (_zero, "layer 0, conv.x of the state"),
        (_one_unit, "layer 2, ssm of the state"),
        (_another_page, "layer 2, conv.x of the state"),
    ],
)
def test_other_states_are_found_by_layer_and_section(
    harm: Callable[[dict[int, dict[str, torch.Tensor]]], None], named: str
) -> None:
    source, destination = rank(), rank()
    harm(source[1])
    problem = audit([source], destination)
    assert problem is not None
    assert problem[0] is Cause.AUDIT
    assert problem[1].startswith(named)


def _scratch(views: dict[int, dict[str, torch.Tensor]]) -> None:
    """The last row of each convolution has what an earlier request's speculation wrote."""
    for sections in views.values():
        for name, view in sections.items():
            if name.startswith("conv"):
                view[:, :, -1] = 100.0


def test_rows_that_only_speculation_writes_are_not_compared() -> None:
    source, destination = rank(scratch=1), rank(scratch=1)
    _scratch(source[1])
    assert audit([source], destination) is None
    control = rank()
    problem = audit([source], control)
    assert problem is not None
    assert problem[1].startswith("layer 0, conv.x of the state")


def test_all_other_rows_are_compared_beside_speculation() -> None:
    source, destination = rank(scratch=1), rank(scratch=1)
    for sections in source[1].values():
        sections["ssm"][:, :, -1] = 100.0
    problem = audit([source], destination)
    assert problem is not None
    assert problem[1].startswith("layer 0, ssm of the state")
    source = rank(scratch=1)
    source[1][2]["conv.b"][:, :, -2] = 100.0
    problem = audit([source], destination)
    assert problem is not None
    assert problem[1].startswith("layer 2, conv.b of the state")
