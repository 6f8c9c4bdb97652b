# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in SGLang's own pools: every element of every section comes where it belongs, and only there."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang_door.door import Pair, reach
from sglang_door.test_sglang_cache import DIM, HEADS, NAMED, SLOTS, TOKENS
from support.agents import until

from pd_connector.errors import Cause, UnsupportedGeometryError
from pd_connector.pages.layer import StatePart
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes
from pd_connector.sglang.cache import describe_cache, own_shard
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.states import Parts, state_parts

RECURRENT, FULL = (0, 2), (1, 3)
PLACES = 8  # slots of the pool of states
KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
DTYPES = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)


def delta_net(ranks: int) -> tuple[Parts, Any]:
    parts = (
        StatePart("conv.q", KEYS // ranks, KEY_DIM),
        StatePart("conv.k", KEYS // ranks, KEY_DIM),
        StatePart("conv.v", VALUES // ranks, VALUE_DIM),
    )
    shape = Mamba2StateShape.create(
        tp_world_size=ranks,
        intermediate_size=VALUES * VALUE_DIM,
        n_groups=KEYS,
        num_heads=VALUES,
        head_dim=VALUE_DIM,
        state_size=KEY_DIM,
        conv_kernel=4,
    )
    return parts, Mamba2CacheParams(shape=shape, layers=list(RECURRENT), dtype=DTYPES)


def kda(ranks: int) -> tuple[Parts, Any]:
    parts = tuple(StatePart(f"conv.{name}", VALUES // ranks, VALUE_DIM) for name in "qkv")
    shape = KimiLinearStateShape.create(
        tp_world_size=ranks, num_heads=VALUES, head_dim=VALUE_DIM, conv_kernel_size=4
    )
    return parts, KimiLinearCacheParams(shape=shape, layers=list(RECURRENT), dtype=DTYPES)


def mamba2(groups: int) -> Any:
    def made(ranks: int) -> tuple[Parts, Any]:
        mixer = SimpleNamespace(
            tp_size=ranks,
            num_heads=VALUES,
            head_dim=VALUE_DIM,
            ssm_state_size=KEY_DIM,
            n_groups=max(groups, ranks),
            norm=SimpleNamespace(n_groups=groups),
        )
        shape = Mamba2StateShape.create(
            tp_world_size=ranks,
            intermediate_size=VALUES * VALUE_DIM,
            n_groups=groups,
            num_heads=VALUES,
            head_dim=VALUE_DIM,
            state_size=KEY_DIM,
            conv_kernel=4,
        )
        params = Mamba2CacheParams(shape=shape, layers=list(RECURRENT), dtype=DTYPES)
        return parts_of("MambaMixer2", mixer), params

    return made


def short_convolution(ranks: int) -> tuple[Parts, Any]:
    module = SimpleNamespace(hidden_size_per_partition=12 // ranks)
    shape = Mamba2StateShape.create(
        tp_world_size=ranks,
        intermediate_size=12,
        n_groups=1,
        num_heads=ranks,
        head_dim=12,
        state_size=0,
        conv_kernel=3,
    )
    params = Mamba2CacheParams(shape=shape, layers=list(RECURRENT), dtype=DTYPES)
    return parts_of("Lfm2ShortConv", module), params


def parts_of(name: str, module: Any) -> Parts:
    """What a model says that has one layer of the class with this name."""
    layer = type(name, (SimpleNamespace,), {})(**vars(module))
    return state_parts(SimpleNamespace(modules=lambda: [layer]))  # type: ignore[arg-type]


KINDS = {
    "delta net": delta_net,
    "kda": kda,
    "mamba2": mamba2(2),
    "mamba2 of one group": mamba2(1),
    "short convolution": short_convolution,
}


def pool_of(kind: str, ranks: int = 1, page_size: int = 16) -> tuple[HybridLinearKVPool, Parts]:
    """A pool with two recurrent layers and two of full attention, full of noise."""
    parts, params = KINDS[kind](ranks)
    states = MambaPool(
        size=PLACES - 1,
        spec_state_size=0,
        cache_params=params,
        mamba_layer_ids=list(RECURRENT),
        device="cpu",
    )
    pool = HybridLinearKVPool(
        size=SLOTS,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=HEADS // ranks,
        head_dim=DIM,
        full_attention_layer_ids=list(FULL),
        device="cpu",
        mamba_pool=states,
    )
    kv = pool.full_kv_pool
    for buffer in (*kv.k_buffer, *kv.v_buffer, *tensors(pool)):
        buffer.copy_(torch.randn(buffer.shape))
    return pool, parts


def tensors(pool: HybridLinearKVPool) -> list[torch.Tensor]:
    """What a rank keeps of states: the convolution and the matrices, `[layer, slot, ...]`."""
    cache = pool.mamba_pool.mamba_cache
    return [cache.conv[0], *([cache.temporal] if cache.temporal.numel() else [])]


def runs(pool: HybridLinearKVPool, parts: Parts, slot: int) -> dict[str, torch.Tensor]:
    """The state in a slot, cut by hand: `[layer, channel, row]` of each run of a convolution, and the matrices."""
    convolution, *matrices = (tensor[:, slot] for tensor in tensors(pool))
    if pool.mamba_pool.conv_slice_axis == 1:
        convolution = convolution.transpose(1, 2)
    found, first = {}, 0
    for part in parts:
        found[part.name] = convolution[:, first : first + part.units * part.dim]
        first += part.units * part.dim
    return found | dict(zip(("ssm",), matrices, strict=False))


def whole(pools: list[tuple[HybridLinearKVPool, Parts]], slot: int) -> dict[str, torch.Tensor]:
    """The state of the whole model, from those of all ranks. Groups of which ranks hold copies are taken once."""
    by_rank = [runs(pool, parts, slot) for pool, parts in pools]
    copies = {p.name: p.units * len(pools) // p.total for p in pools[0][1] if p.total}
    return {
        name: torch.cat([rank[name] for rank in by_rank[:: copies.get(name, 1)]], 1)
        for name in by_rank[0]
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks_p", "ranks_d"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_state_passes_between_any_numbers_of_ranks(kind: str, ranks_p: int, ranks_d: int) -> None:
    """By section: Q, K and V of a convolution are shared out each by itself."""
    sources, destinations = (
        [pool_of(kind, ranks) for _ in range(ranks)] for ranks in (ranks_p, ranks_d)
    )
    for pool, _ in sources[1:]:  # copies of a group are equal
        for name, copy in runs(pool, sources[0][1], 3).items():
            if kind.endswith("one group") and name in ("conv.b", "conv.c"):
                copy.copy_(runs(sources[0][0], sources[0][1], 3)[name])
    before = [[tensor.clone() for tensor in tensors(pool)] for pool, _ in destinations]
    caches = [
        [
            describe_cache(pool, NAMED, own_shard(pool, rank, len(side)), parts=parts)
            for rank, (pool, parts) in enumerate(side)
        ]
        for side in (sources, destinations)
    ]
    for source in caches[0]:
        for destination in caches[1]:
            found = routes(source.geometry, destination.geometry, ("raw",), ("raw",))
            for chunk in plan(found, 0, 16, 1 << 20, state_token=16):
                route = found[chunk.route]
                if route.section is None:
                    continue
                slot = memoryview(bytearray(chunk.nbytes(route)))
                payload = source.gather(route, chunk, [3], slot)
                destination.scatter(route, chunk, [5], payload)
    sent, got = whole(sources, 3), whole(destinations, 5)
    assert sent.keys() == got.keys()
    for name, state in sent.items():
        assert torch.equal(state, got[name]), name
    others = [slot for slot in range(PLACES) if slot != 5]
    for (pool, _), old in zip(destinations, before, strict=True):
        for tensor, earlier in zip(tensors(pool), old, strict=True):
            assert torch.equal(tensor[:, others], earlier[:, others]), "another request's state"


def test_matrices_of_kernels_for_a_cpu_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep `[key dim][value dim]`, where those for a GPU, and vLLM's, have `[value dim][key dim]`."""
    (here, parts), (there, _) = pool_of("delta net"), pool_of("delta net")
    there_cache = describe_cache(there, NAMED, own_shard(there, 0, 1), parts=parts)
    monkeypatch.setattr("sglang.srt.utils.is_cpu", lambda: True)
    here_cache = describe_cache(here, NAMED, own_shard(here, 0, 1), parts=parts)

    def pass_state(source: Any, slot: int, destination: Any, into: int) -> None:
        found = routes(source.geometry, destination.geometry, ("raw",), ("raw",))
        for chunk in plan(found, 0, 16, 1 << 20, state_token=16):
            route = found[chunk.route]
            if route.section is not None:
                passed = memoryview(bytearray(chunk.nbytes(route)))
                passed = source.gather(route, chunk, [slot], passed)
                destination.scatter(route, chunk, [into], passed)

    pass_state(here_cache, 3, there_cache, 5)
    pass_state(there_cache, 4, here_cache, 6)
    for turned, other in ((3, 5), (6, 4)):
        on_cpu, on_gpu = runs(here, parts, turned), runs(there, parts, other)
        in_memory = on_cpu["ssm"].reshape(len(RECURRENT), VALUES, KEY_DIM, VALUE_DIM)
        assert torch.equal(in_memory.transpose(2, 3), on_gpu["ssm"])
        assert torch.equal(on_cpu["conv.v"], on_gpu["conv.v"])
    assert not torch.equal(on_cpu["ssm"], runs(here, parts, 3)["ssm"]), "another slot's state"


def test_a_request_goes_through_both_engines_with_its_state() -> None:
    """KV of attention in pages of unlike sizes, and the state in a slot of another number."""
    made = pool_of("delta net"), pool_of("delta net", page_size=1)
    pair = Pair((16, 1), tuple(made))  # type: ignore[arg-type]
    try:
        req = pair.request()
        sender, receiver = pair.sender(req), pair.receiver(req)
        send(pair, sender, req, slot=3)
        reach(receiver.poll, KVPoll.WaitingForInput)
        others = [tensor[:, [0, 1, 2, 3, 4, 6, 7]].clone() for tensor in tensors(pair.d.pool)]
        receiver.send_metadata(pair.pages(pair.d), 2, [[5]], decode_prefix_len=0)
        reach(receiver.poll, KVPoll.Success)
        sent, got = (whole([one], slot) for one, slot in zip(made, (3, 5), strict=True))
        assert all(torch.equal(sent[name], got[name]) for name in sent)
        for tensor, earlier in zip(tensors(pair.d.pool), others, strict=True):
            assert torch.equal(tensor[:, [0, 1, 2, 3, 4, 6, 7]], earlier)
        for engine in (pair.p, pair.d):
            engine.pool.k_buffer = engine.pool.full_kv_pool.k_buffer
        pair.assert_same_slots("k_buffer")
        reach(sender.poll, KVPoll.Success)
        sender.clear()
        receiver.clear()
        until(pair.idle, "idle")
    finally:
        pair.close()


def test_a_state_of_another_token_is_refused_and_not_written() -> None:
    pair = Pair(pools=(pool_of("delta net"), pool_of("delta net")))
    try:
        req = pair.request()
        sender, receiver = pair.sender(req), pair.receiver(req)
        agent, submit = pair.p.agent, pair.p.agent.submit
        agent.submit = lambda command, **options: submit(  # type: ignore[method-assign]
            command._replace(state_token=TOKENS - 1)
            if getattr(command, "state_token", 0)
            else command,
            **options,
        )
        before = [tensor.clone() for tensor in tensors(pair.d.pool)]
        send(pair, sender, req, slot=3)
        reach(receiver.poll, KVPoll.WaitingForInput)
        receiver.send_metadata(pair.pages(pair.d), 2, [[5]], decode_prefix_len=0)
        reach(receiver.poll, KVPoll.Failed)
        with pytest.raises(
            TransferError, match=f"stand after {TOKENS - 1} tokens, wanted after {TOKENS}"
        ) as caught:
            receiver.failure_exception()
        assert Cause.TOKENS in str(caught.value)
        assert "set from_first_token" in str(caught.value), "what to do where vLLM has computed it"
        assert all(map(torch.equal, tensors(pair.d.pool), before))
    finally:
        pair.close()


@pytest.mark.parametrize("slot", [0, -1, PLACES])
def test_a_slot_that_no_request_can_have_ends_its_request(slot: int) -> None:
    pair = Pair(pools=(pool_of("delta net"), pool_of("delta net")))
    try:
        req = pair.request()
        sender = pair.sender(req)
        send(pair, sender, req, slot=slot)
        assert sender.poll() == KVPoll.Failed
        with pytest.raises(TransferError, match=f"state in slot {slot}: the pool has slots 1 to"):
            sender.failure_exception()
    finally:
        pair.close()


def send(pair: Pair, sender: Any, req: Any, slot: int) -> None:
    """The prompt in two chunks; its state comes with the last."""
    pages, size = pair.pages(pair.p), pair.p.rank.pages.size
    first = 16 // size
    sender.send(pages[:first], None, num_kv_tokens=16)
    pair.p.rank.buffers.set_buf(req)
    sender.send(pages[first:], [[slot]], num_kv_tokens=TOKENS - 16)


def test_states_that_cannot_be_moved_are_named() -> None:
    pool, parts = pool_of("delta net")
    shard = own_shard(pool, 0, 1)
    with pytest.raises(UnsupportedGeometryError, match="moves states of RadixLinearAttention"):
        describe_cache(pool, NAMED, shard)
    with pytest.raises(UnsupportedGeometryError, match=r"44 channels: wanted 12 \+ 20"):
        describe_cache(pool, NAMED, shard, parts=parts[1:])
    pool.full_attention_layer_id_mapping = {2: 0, 3: 1}
    with pytest.raises(UnsupportedGeometryError, match="layer 2 has attention and a state"):
        describe_cache(pool, NAMED, shard, parts=parts)
    pool.mamba_pool.register_slot_state(SimpleNamespace())
    with pytest.raises(UnsupportedGeometryError, match="SimpleNamespace beside a MambaPool"):
        describe_cache(pool, NAMED, shard, parts=parts)
    unlike = [
        type("Lfm2ShortConv", (SimpleNamespace,), {})(hidden_size_per_partition=size)
        for size in (4, 8)
    ]
    with pytest.raises(UnsupportedGeometryError, match="alike in all layers"):
        state_parts(SimpleNamespace(modules=lambda: unlike))  # type: ignore[arg-type]
