# SPDX-License-Identifier: Apache-2.0
"""Layers of one model with unlike numbers of KV heads: full attention with four, windows with eight (MiMo-V2)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

kv = pytest.importorskip("vllm.v1.kv_cache_interface")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from vllm.model_executor.layers.linear import ReplicatedLinear  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from pd_connector.errors import UnsupportedGeometryError  # noqa: E402
from pd_connector.pages.paged_cache import PagedCache  # noqa: E402
from pd_connector.plan.chunks import plan  # noqa: E402
from pd_connector.plan.coverage import uncovered  # noqa: E402
from pd_connector.plan.route import routes  # noqa: E402
from pd_connector.vllm.cache import describe_cache  # noqa: E402
from pd_connector.vllm.identity import owners  # noqa: E402
from pd_connector.vllm.identity.heads import layer_heads  # noqa: E402

PAGE, DIM, PAGES, TOKENS, WINDOW = 32, 32, 4, 70, 1000
MODEL_SAYS = 4  # the one number of the model's config


class Attention(torch.nn.Module):
    """As vLLM's, on a CPU without AMX."""

    attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    impl = SimpleNamespace(isa="vec")


class Block(torch.nn.Module):
    """A layer's attention, and the projection that shards its K and V."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.qkv_proj = projection
        self.attn = Attention()


class Projection(torch.nn.Module):
    def __init__(self, total: int) -> None:
        super().__init__()
        self.total_num_kv_heads = total


class Described(NamedTuple):
    cache: PagedCache
    tensors: list[torch.Tensor]  # by layer: [page, head, 2 * token * dim]


def name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def rank_of(
    heads: tuple[int, ...],
    rank: int,
    ranks: int,
    blocks: list[torch.nn.Module] | None = None,
    *,
    one_table: bool = False,
) -> Described:
    """A rank's cache, from vLLM's own specs. Layers with other heads than the first have a window, or with `one_table`
    keep everything, as without vLLM's hybrid manager."""
    owners.watch()
    kept = torch.nn.ModuleList(blocks or [Block(Projection(total)) for total in heads])
    attentions = {name(n): block.attn for n, block in enumerate(kept)}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=attentions),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=rank,
            world_size=ranks,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: MODEL_SAYS),
    )
    views, placed, specs = {}, [], {}
    for number, total in enumerate(heads):
        told = {
            "block_size": PAGE,
            "num_kv_heads": max(1, total // ranks),
            "head_size": DIM,
            "dtype": torch.float32,
        }
        spec = (
            kv.FullAttentionSpec(**told)
            if one_table or total == heads[0]
            else kv.SlidingWindowSpec(**told, sliding_window=WINDOW)
        )
        size = PAGES * spec.page_size_bytes
        place = kv.KVCacheTensor(size, [name(number)], size, spec.page_size_bytes)
        memory = torch.zeros(size, dtype=torch.int8)
        (views[name(number)],) = kv.create_kv_cache_views(
            memory, spec, PAGES, KVCacheLayout.LBHNC, place
        )
        placed.append(place)
        specs[name(number)] = spec
    groups = [kv.KVCacheGroupSpec([layer], spec) for layer, spec in specs.items()]
    if one_table:
        alike = kv.UniformTypeKVCacheSpecs(block_size=PAGE, kv_cache_specs=specs)
        groups = [kv.KVCacheGroupSpec(list(specs), alike)]
    numbers = {name(n): n for n in range(len(heads))}
    cache = describe_cache(views, kv.KVCacheConfig(PAGES, placed, groups), config, numbers)
    tensors = [views[name(n)].reshape(PAGES, -1, 2 * PAGE * DIM) for n in range(len(heads))]
    return Described(cache, tensors)


def held(total: int, rank: int, ranks: int) -> range:
    """The heads of a layer that vLLM's `QKVParallelLinear` gives to a rank."""
    if ranks >= total:
        head = rank // (ranks // total)
        return range(head, head + 1)
    return range(rank * (total // ranks), (rank + 1) * (total // ranks))


def elements(described: Described, layer: int, heads: range) -> Iterator[tuple[torch.Tensor, int]]:
    """K and then V of each head and token, with a number of its own each."""
    for place, head in enumerate(heads):
        for token in range(TOKENS):
            page, within = divmod(token, PAGE)
            half = described.tensors[layer][page, place]
            key, value = half[: PAGE * DIM].view(DIM, PAGE), half[PAGE * DIM :].view(PAGE, DIM)
            number = ((layer * 16 + head) * TOKENS + token) * 2 * DIM
            yield key[:, within], number
            yield value[within], number + DIM


HEADS = st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4).map(tuple)
RANKS = st.sampled_from([1, 2, 4, 8, 16])


@given(HEADS, RANKS, RANKS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_each_element_arrives_at_its_place_whatever_heads_the_layers_have(
    heads: tuple[int, ...], ours: int, theirs: int, one_table: bool
) -> None:
    check_pair(heads, ours, theirs, one_table=one_table)


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (8, 16), (8, 8), (16, 2)])
def test_windows_with_more_heads_than_full_layers_pass_at_any_parallelism(
    ours: int, theirs: int
) -> None:
    check_pair((4, 8, 4), ours, theirs)


def check_pair(heads: tuple[int, ...], ours: int, theirs: int, *, one_table: bool = False) -> None:
    sources = [rank_of(heads, rank, ours, one_table=one_table) for rank in range(ours)]
    for rank, source in enumerate(sources):
        for layer, total in enumerate(heads):
            for place, number in elements(source, layer, held(total, rank, ours)):
                place.copy_(torch.arange(number, number + DIM))
    for rank in range(theirs):
        destination = rank_of(heads, rank, theirs, one_table=one_table)
        found = []
        for source in sources:
            paths = routes(source.cache.geometry, destination.cache.geometry, ["raw"], ["raw"])
            found.append(paths)
            for chunk in plan(paths, 0, TOKENS, chunk_bytes=1 << 22):
                path = paths[chunk.route]
                slot = memoryview(bytearray(chunk.nbytes(path)))
                pages = list(chunk.pages(PAGE))
                payload = source.cache.gather(path, chunk, pages, slot)
                destination.cache.scatter(path, chunk, pages, payload)
        assert uncovered(tuple(found), destination.cache.geometry) == ""
        for layer, total in enumerate(heads):
            for place, number in elements(destination, layer, held(total, rank, theirs)):
                assert place.tolist() == list(range(number, number + DIM))


def geometry_heads(described: Described) -> list[int]:
    return [group.heads for group in described.cache.geometry.groups for _ in group.layers]


def test_layers_whose_pages_are_alike_and_whose_heads_are_not_are_no_group() -> None:
    """At eight ranks a layer with four heads and one with eight have pages of the same form."""
    assert geometry_heads(rank_of((8, 4, 8), 0, 8, one_table=True)) == [8, 8, 4]


def test_a_projection_that_every_rank_has_whole_is_one_head_for_all() -> None:
    """Step-3: one KV head, computed by every rank."""
    projection = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(projection)
    assert geometry_heads(rank_of((1,), 3, 8, [Block(projection)])) == [1]


def test_heads_that_no_module_names_are_refused_where_ranks_may_share_them() -> None:
    unknown = Block(torch.nn.Identity())
    with pytest.raises(UnsupportedGeometryError, match=r"layers\.0\.self_attn.*does not say how"):
        rank_of((4,), 0, 4, [unknown])
    assert geometry_heads(rank_of((4,), 0, 2, [Block(torch.nn.Identity())])) == [4]
    assert geometry_heads(rank_of((4,), 0, 1, [Block(torch.nn.Identity())])) == [4]


def test_without_the_plug_in_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_owners", {})
    with pytest.raises(UnsupportedGeometryError, match="does VLLM_PLUGINS leave out pd_connector"):
        layer_heads(
            SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context={name(0): Attention()}),
                parallel_config=SimpleNamespace(tensor_parallel_size=4),
            ),
            name(0),
            1,
        )


def test_heads_that_contradict_the_projection_are_refused_with_both_numbers() -> None:
    """A projection that is not sharded, for example: each rank would hold all four heads."""
    with pytest.raises(UnsupportedGeometryError, match=r"keeps 2 KV heads on each of 4 .* names 4"):
        rank_of((8,), 0, 4, [Block(Projection(4))])
