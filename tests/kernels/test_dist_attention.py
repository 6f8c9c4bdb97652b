# SPDX-License-Identifier: Apache-2.0
"""Attention over KV that lies on several ranks is attention over all of it, and no KV travels.

Ranks are processes that talk over gloo. They are started once, `python test_dist_attention.py RANK
FOLDER`, go through all cases, and write down what they found.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_kernels.attention.dist import Placement

RANKS = 4
PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 16
DEADLINE_S = 120
PARTIAL_BYTES = HEADS * (DIM + 1) * 4


@dataclass(frozen=True)
class Case:
    """Some sequences, and where their KV lies.

    Attributes:
        ranks: of the world, that take part.
        owners: of each sequence.
        shards: of each sequence, tokens by rank, in the order of the tokens.
    """

    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    shards: tuple[dict[int, int], ...]
    queries: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def placement(self) -> Placement:
        return Placement(self.owners, tuple(tuple(shard) for shard in self.shards))

    def data(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[queries, heads, dim]`, and K and V `[token, kv heads, dim]`."""
        chance = torch.Generator().manual_seed(sequence)
        tokens = sum(self.shards[sequence].values())
        kv = torch.randn(2, tokens, KV_HEADS, DIM, generator=chance).to(self.dtype)
        q = torch.randn(self.queries, HEADS, DIM, generator=chance).to(self.dtype)
        return q, *kv.unbind()

    def sent_bytes(self, rank: int) -> int:
        """Queries to the ranks that hold KV, and partials to the ranks that asked."""
        place = self.placement
        others = [other for other in range(len(self.ranks)) if other != rank]
        asked = sum(len(place.requested(rank, other)) for other in others)
        answered = sum(len(place.requested(other, rank)) for other in others)
        query_bytes = HEADS * DIM * self.dtype.itemsize
        return self.queries * (asked * query_bytes + answered * PARTIAL_BYTES)


TWO, FOUR, LAST = (0, 1), (0, 1, 2, 3), (1, 3)
ONE_OWNER = (0, 0, 0)
CASES = {
    "two ranks, one owner": Case(TWO, ONE_OWNER, ({0: 10, 1: 3}, {1: 5, 0: 8}, {0: 1, 1: 30})),
    "four ranks, one owner": Case(FOUR, (2, 2), ({0: 7, 3: 5, 1: 9, 2: 2}, {1: 13, 2: 1})),
    "all ranks own queries": Case(
        FOUR,
        (0, 3, 1, 0, 2, 3),
        ({0: 4, 1: 6}, {2: 31}, {3: 3, 1: 3}, {0: 9}, {1: 1, 3: 8, 2: 4}, {0: 5, 2: 1, 3: 2}),
    ),
    "all shards are empty but one": Case(TWO, (0, 1), ({0: 0, 1: 6}, {0: 12, 1: 0})),
    "a sequence without KV": Case(TWO, ONE_OWNER, ({0: 3, 1: 3}, {}, {0: 0, 1: 0})),
    "a rank with nothing to do": Case(FOUR, (1,), ({2: 6, 1: 5},)),
    "several queries": Case(
        FOUR, (0, 2, 1), ({1: 9, 0: 6}, {0: 8, 3: 11, 2: 4}, {2: 3, 1: 17}), queries=3
    ),
    "bfloat16": Case(TWO, (0, 1), ({0: 10, 1: 4}, {0: 3, 1: 40}), dtype=torch.bfloat16),
    "a group of some ranks of the world": Case(LAST, (0, 1), ({0: 10, 1: 4}, {1: 5, 0: 3})),
    "a long context": Case(TWO, ONE_OWNER, ({0: 1000, 1: 300}, {1: 500, 0: 800}, {0: 1, 1: 900})),
}
DAMAGED = {"a shard that is dropped": CASES["two ranks, one owner"]}


def wanted(case: Case, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` of a sequence whose KV lies in one place, in float64."""
    q, key, value = (each.double() for each in case.data(sequence))
    tokens = len(key)
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = torch.einsum("qhd,thd->qht", q, key) * DIM**-0.5
    last = torch.arange(tokens - case.queries, tokens)
    scores = scores.masked_fill(torch.arange(tokens) > last[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("qht,thd->qhd", weights, value), lse


class Found:
    """What the ranks of a case have written down."""

    def __init__(self, folder: Path, name: str, case: Case) -> None:
        self.case = case
        self.by_rank: list[dict[str, Any]] = [
            torch.load(folder / f"{name}.{rank}.pt") for rank in case.ranks
        ]

    def distance(self) -> float:
        """Largest distance of an element of `out` from that of attention in one place."""
        distances = [0.0]
        for rank, here in enumerate(self.by_rank):
            for row, sequence in enumerate(self.case.placement.own(rank)):
                out, lse = wanted(self.case, sequence)
                distances.append(float((here["out"][row] - out).abs().max()))
                torch.testing.assert_close(here["lse"][row].double(), lse, atol=1e-2, rtol=0)
        return max(distances)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)[-5000:]
    return {name: Found(folder, name, case) for name, case in (CASES | DAMAGED).items()}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_attention_in_one_place(found: dict[str, Found], name: str) -> None:
    tolerance = 1e-6 if CASES[name].dtype == torch.float32 else 1e-2
    assert found[name].distance() <= tolerance


def test_without_kv_there_is_nothing_to_attend_to(found: dict[str, Found]) -> None:
    here = found["a sequence without KV"].by_rank[0]
    assert not here["out"][1:].any()
    assert bool((here["lse"][1:] == -torch.inf).all())


@pytest.mark.parametrize("name", CASES)
def test_only_queries_and_partials_are_shipped(found: dict[str, Found], name: str) -> None:
    for rank, here in enumerate(found[name].by_rank):
        assert here["sent"] == here["sent by torch"] == CASES[name].sent_bytes(rank)


def test_a_longer_context_ships_no_byte_more(found: dict[str, Found]) -> None:
    short, long = found["two ranks, one owner"], found["a long context"]
    for one, other in zip(short.by_rank, long.by_rank, strict=True):
        assert one["sent"] == other["sent"] > 0


def test_a_rank_that_holds_and_asks_nothing_ships_nothing(found: dict[str, Found]) -> None:
    sent = [here["sent"] for here in found["a rank with nothing to do"].by_rank]
    assert sent[0] == sent[3] == 0
    assert min(sent[1:3]) > 0


def test_a_shard_that_is_dropped_is_missed(found: dict[str, Found]) -> None:
    """The negative control."""
    (name,) = DAMAGED
    with pytest.raises(AssertionError, match="not close"):
        found[name].distance()


def test_placements_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="the group has 2 ranks"):
        Placement((0,), ((0, 2),)).check(2)
    with pytest.raises(ValueError, match="one shard"):
        Placement((0,), ((1, 1),)).check(2)
    with pytest.raises(ValueError, match="1 owners, 2 holders"):
        Placement((0,), ((1,), (0,))).check(2)


def test_a_batch_that_does_not_fit_the_placement_is_refused(found: dict[str, Found]) -> None:
    refusal = found["bfloat16"].by_rank[0]["refusal"]
    assert refusal.startswith("0 queries, 2 rows of KV: rank 0 owns 1 sequences")


def _shard(case: Case, rank: int, dropped: bool) -> Any:
    """What a rank holds, in pages that lie in no order."""
    from pd_kernels.attention.dist import KvShard

    held = case.placement.held(rank)
    lengths = [case.shards[sequence][rank] for sequence in held]
    most = -(-max(lengths, default=1) // PAGE) or 1
    pages = torch.randperm(len(held) * most, generator=torch.Generator().manual_seed(rank))
    table = pages.view(len(held), most).int()
    caches = torch.full((2, max(1, len(pages)), PAGE, KV_HEADS, DIM), torch.nan).to(case.dtype)
    for row, sequence in enumerate(held):
        ranks = list(case.shards[sequence])
        before = sum(case.shards[sequence][one] for one in ranks[: ranks.index(rank)])
        for cache, whole in zip(caches, case.data(sequence)[1:], strict=True):
            for token in range(lengths[row]):
                page = table[row, token // PAGE]
                cache[page, token % PAGE] = whole[before + token]
    kept = torch.tensor(lengths, dtype=torch.int32)
    return KvShard(*caches, table, kept * 0 if dropped else kept)


def _main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    from pd_kernels.attention.dist import dist_attention

    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in (TWO, FOUR, LAST)}
    sent = 0
    theirs = dist.P2POp

    class Counted(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, op: Any, tensor: torch.Tensor, **kwargs: Any) -> None:
            nonlocal sent
            super().__init__(op, tensor, **kwargs)
            sent += tensor.numel() * tensor.element_size() if op is dist.isend else 0

    dist.P2POp = Counted
    for name, case in (CASES | DAMAGED).items():
        if rank not in case.ranks:
            continue
        own = case.ranks.index(rank)
        q = [case.data(sequence)[0] for sequence in case.placement.own(own)]
        query = torch.stack(q) if q else torch.empty(0, case.queries, HEADS, DIM, dtype=case.dtype)
        shard = _shard(case, own, name in DAMAGED and own == 1)
        sent = 0
        result = dist_attention(query, shard, case.placement, group=groups[case.ranks])
        found = {"out": result.out, "lse": result.lse, "sent": result.sent_bytes}
        if name == "bfloat16":  # nobody waits for anybody yet when it is refused
            with pytest.raises(ValueError, match="owns 1 sequences") as refusal:
                dist_attention(query[:0], shard, case.placement, group=groups[case.ranks])
            found["refusal"] = str(refusal.value)
        torch.save(found | {"sent by torch": sent}, folder / f"{name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
