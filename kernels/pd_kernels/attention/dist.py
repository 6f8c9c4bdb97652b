# SPDX-License-Identifier: Apache-2.0
"""Attention over KV that lies on several ranks: queries and partials travel, KV does not.

As in DistAttention (Infinite-LLM, Lin et al. 2024): the owner of a sequence sends its queries to
the ranks that hold KV of it, each rank attends to what it holds, and the owner merges the partials.
The bytes sent depend on the number of queries and holders, not on the length of the context. All
ranks of a process group (gloo for CPU tensors, NCCL for GPUs) call `dist_attention` together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pd_kernels.attention.merge import Partials, merge_partials
from pd_kernels.attention.paged import paged_decode


@dataclass(frozen=True)
class Placement:
    """The ranks that have the queries and the KV of a batch. Ranks are numbered within the process
    group.

    Attributes:
        owners: the rank of each sequence that has its queries and gets its result.
        holders: the ranks of each sequence that hold some of its KV, in the order of its tokens.
            The last rank holds the queries' own tokens. Empty for a sequence without KV.

    Example:
        Sequence 0 belongs to rank 0 and lies on both ranks; sequence 1 is rank 1's alone.

        >>> placement = Placement(owners=(0, 1), holders=((0, 1), (1,)))
        >>> placement.held(0), placement.held(1)
        ([0], [0, 1])
        >>> placement.newest(1)
        [True, True]
    """

    owners: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def check(self, ranks: int) -> None:
        """Raise ValueError if a rank is not in the group of `ranks` ranks, or holds a sequence
        twice."""
        if len(self.owners) != len(self.holders):
            raise ValueError(
                f"{len(self.owners)} owners, {len(self.holders)} holders: must be one of each per sequence"
            )
        for owner, holders in zip(self.owners, self.holders, strict=True):
            if not all(0 <= rank < ranks for rank in (owner, *holders)):
                raise ValueError(f"owner {owner}, holders {holders}: the group has {ranks} ranks")
            if len(set(holders)) != len(holders):
                raise ValueError(f"holders {holders}: a rank's KV of a sequence is one shard")

    def own(self, rank: int) -> list[int]:
        """The sequences whose queries a rank has, in the order of `q`."""
        return [sequence for sequence, owner in enumerate(self.owners) if owner == rank]

    def held(self, rank: int) -> list[int]:
        """The sequences whose KV a rank holds, in the order of its shard's rows: by owner, then by
        number."""
        sequences = [sequence for sequence, ranks in enumerate(self.holders) if rank in ranks]
        return sorted(sequences, key=lambda sequence: self.owners[sequence])

    def requested(self, owner: int, holder: int) -> list[int]:
        """The rows of an owner's queries that a holder attends with."""
        own = enumerate(self.own(owner))
        return [row for row, sequence in own if holder in self.holders[sequence]]

    def newest(self, rank: int) -> list[bool]:
        """For each row of a rank's shard, whether the shard ends with the queries' own tokens."""
        return [self.holders[sequence][-1] == rank for sequence in self.held(rank)]


class KvShard(NamedTuple):
    """The KV that one rank holds, with a row for each sequence in `Placement.held(rank)`.

    Attributes:
        k_cache, v_cache: `[pages, page, kv heads, dim]`, as `paged_decode` takes them.
        block_table: int32 `[rows, pages of a shard]`.
        lengths: int32 `[rows]`, tokens of each sequence that the rank holds; 0 is allowed.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    def rows(self, rows: Sequence[int]) -> "KvShard":
        """The shard with only the given rows, in the given order."""
        index = torch.tensor(rows, device=self.lengths.device)
        return self._replace(block_table=self.block_table[index], lengths=self.lengths[index])


class Attended(NamedTuple):
    """The result for a rank's own queries.

    Attributes:
        out: shaped like `q`.
        lse: float32 `[own, (queries,) heads]`, natural log-sum-exp.
        sent_bytes: bytes of queries and partials that this rank sent to others.
    """

    out: torch.Tensor
    lse: torch.Tensor
    sent_bytes: int


Attend = Callable[[torch.Tensor, KvShard, bool], Partials]
"""Attention over a shard: takes queries `[rows, queries, heads, dim]`, the shard, and whether the
shard ends with the queries' own tokens (`causal`)."""


def paged_partials(
    q: torch.Tensor,
    shard: KvShard,
    causal: bool,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Partials:
    """Attend with `paged_decode` to a shard."""
    return Partials(
        *paged_decode(
            q,
            *shard,
            causal=causal,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_partials=True,
        )
    )


def dist_attention(
    q: torch.Tensor,
    shard: KvShard,
    placement: Placement,
    *,
    group: dist.ProcessGroup | None = None,
    attend: Attend = paged_partials,
    out: torch.Tensor | None = None,
) -> Attended:
    """Attend with this rank's queries to the KV on all ranks, and with other ranks' queries to the
    KV here.

    All ranks of the group call this together. With NCCL, a new group must have communicated before
    (a barrier is enough), because this call need not involve all ranks.

    Args:
        q: `[own, heads, dim]` or `[own, queries, heads, dim]`, for the sequences of
            `placement.own(rank)` in their order. All ranks pass the same shape and dtype except for
            `own`. A rank that owns no sequence passes an axis of length 0.
        shard: the KV that this rank holds.
        placement: the owner and the holders of each sequence; the same on all ranks.
        group: the process group; all processes by default.
        attend: attention over a shard. If scores depend on a token's position in the sequence
            (windows, ALiBi), pass a function that knows where shards begin.
        out: dense, shaped like `q`; written. A new tensor of q's dtype by default.

    Returns:
        The result of this rank's queries, and the number of bytes that it sent.

    Raises:
        ValueError: `placement` does not fit the group, `q` or `shard`.

    Source:
        DistAttention, Infinite-LLM (Lin et al. 2024, arXiv 2401.02669).

    Example:
        A group of one rank, which owns the sequence and holds its 20 tokens.

        >>> import torch
        >>> import torch.distributed as dist
        >>> from pd_kernels.attention.dist import KvShard, dist_attention
        >>> from pd_kernels.attention.dist import Placement
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> k_cache, v_cache = torch.randn(2, 2, 16, 2, 64)
        >>> table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        >>> shard = KvShard(k_cache, v_cache, table, lengths)
        >>> result = dist_attention(torch.randn(1, 4, 64), shard, Placement(owners=(0,), holders=((0,),)))
        >>> result.out.shape, result.sent_bytes
        (torch.Size([1, 4, 64]), 0)
        >>> dist.destroy_process_group()
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    placement.check(ranks)
    query = q.unsqueeze(1) if q.dim() == 3 else q
    held = placement.held(rank)
    if len(query) != len(placement.own(rank)) or len(shard.lengths) != len(held):
        raise ValueError(
            f"{len(query)} queries, {len(shard.lengths)} rows of KV: rank {rank} owns "
            f"{len(placement.own(rank))} sequences and holds KV of {len(held)}"
        )
    mail = _Mail(rank, group)
    queries = query.new_empty(len(held), *query.shape[1:])
    sources = [len(placement.requested(owner, rank)) for owner in range(ranks)]
    for peer, there in enumerate(queries.split(sources)):
        mail.receive([there], peer)
        rows = placement.requested(rank, peer)
        mail.send([query if len(rows) == len(query) else query[rows]], peer)
    mail.deliver()
    partials = _attend(queries, shard, placement.newest(rank), attend)
    merged = _return(mail, partials, sources, query, placement, out)
    lse = merged.lse.squeeze(1) if q.dim() == 3 else merged.lse
    return Attended(merged.out.view(q.shape), lse, mail.sent_bytes)


def _attend(
    queries: torch.Tensor, shard: KvShard, newest: Sequence[bool], attend: Attend
) -> Partials:
    """Attend with all rows. This takes two calls if rows have several queries and only some rows
    end with the queries' tokens; otherwise one."""
    if not newest:
        return Partials(queries.float(), queries.new_empty(queries.shape[:-1], dtype=torch.float32))
    if queries.shape[1] == 1 or len(set(newest)) == 1:
        return attend(queries, shard, newest[0])
    out = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    lse = out.new_empty(out.shape[:-1])
    for causal in (True, False):
        rows = [row for row, own in enumerate(newest) if own is causal]
        out[rows], lse[rows] = attend(queries[rows], shard.rows(rows), causal)
    return Partials(out, lse)


def _return(
    mail: "_Mail",
    partials: Partials,
    sources: Sequence[int],
    query: torch.Tensor,
    placement: Placement,
    out: torch.Tensor | None,
) -> Partials:
    """Return partials to the ranks that sent queries, and merge those that come back."""
    requested = {peer: placement.requested(mail.rank, peer) for peer in range(len(sources))}
    requested = {peer: rows for peer, rows in requested.items() if rows}
    outs = query.new_empty(max(1, len(requested)), *query.shape, dtype=torch.float32)
    lses = outs.new_full(outs.shape[:-1], -torch.inf)
    late = []
    for place, (peer, rows) in enumerate(requested.items()):
        whole = len(rows) == len(query)
        index: Any = place if whole else (place, rows)
        there = Partials(outs[index], lses[index])
        mail.receive(there, peer)
        if not whole:  # an indexed tensor is a copy: written back when it has arrived
            late.append((place, rows, there))
    parts = zip(partials.out.split(list(sources)), partials.lse.split(list(sources)), strict=True)
    for peer, part in enumerate(parts):
        mail.send(part, peer)
    mail.deliver()
    for place, rows, there in late:
        outs[place, rows], lses[place, rows] = there
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return merge_partials(outs, lses, out.view(query.shape))


class _Mail:
    """Tensors from and to other ranks, posted together. Tensors from a rank to itself are
    copied."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._group = group
        self._posted: list[dist.P2POp] = []
        self._own: list[list[torch.Tensor]] = [[], []]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Post receives into dense tensors; `deliver` waits for them. Empty tensors are not
        sent."""
        self._post(dist.irecv, tensors, peer)

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Post sends of tensors to a peer. The peer must receive the same number of tensors with
        the same shapes."""
        tensors = [tensor.contiguous() for tensor in tensors]
        if peer != self.rank:
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        self._post(dist.isend, tensors, peer)

    def _post(
        self, kind: Callable[..., object], tensors: Sequence[torch.Tensor], peer: int
    ) -> None:
        for tag, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            if peer == self.rank:
                self._own[kind is dist.isend].append(tensor)
            else:
                self._posted.append(
                    dist.P2POp(kind, tensor, group=self._group, tag=tag, group_peer=peer)
                )

    def deliver(self) -> None:
        """Wait until everything posted has arrived. With NCCL the current stream waits, not the
        host."""
        for written, read in zip(*self._own, strict=True):
            written.copy_(read)
        for work in dist.batch_isend_irecv(self._posted) if self._posted else ():
            work.wait()
        self._posted.clear()
        self._own = [[], []]
