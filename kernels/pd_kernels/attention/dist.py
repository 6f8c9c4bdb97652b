# SPDX-License-Identifier: Apache-2.0
"""Attention over KV that lies on several ranks: queries and partials travel, KV does not.

As DistAttention does it (Infinite-LLM, Lin et al. 2024): the owner of a sequence sends its query to the
ranks that hold KV of it, each attends to what it holds, and the owner merges the partials. What is
shipped depends on the number of queries and holders, not on the length of the context. The ranks of a
process group, gloo for CPU tensors and NCCL for a GPU's, call `dist_attention` together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pd_kernels.attention.dist_placement import Placement
from pd_kernels.attention.merge import Partials, merge_partials
from pd_kernels.attention.paged import paged_decode


class KvShard(NamedTuple):
    """The KV that a rank holds, a row for each sequence of `Placement.held(rank)`.

    Attributes:
        k_cache, v_cache: `[pages, page, kv heads, dim]`, as `paged_decode` takes them.
        block_table: int32 `[rows, pages of a shard]`.
        lengths: int32 `[rows]`, tokens held; may be 0.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    def rows(self, rows: Sequence[int]) -> "KvShard":
        """Only those rows."""
        index = torch.tensor(rows, device=self.lengths.device)
        return self._replace(block_table=self.block_table[index], lengths=self.lengths[index])


class Attended(NamedTuple):
    """What a rank gets for its own queries, and what it has sent for that of all."""

    out: torch.Tensor  # [own, queries, heads, dim], or as `q` without queries
    lse: torch.Tensor  # float32 [own, queries, heads]
    sent_bytes: int  # of queries and partials, to other ranks


Attend = Callable[[torch.Tensor, KvShard, bool], Partials]
"""Of queries `[rows, queries, heads, dim]`, a shard, and whether it ends with the queries' own tokens."""


def paged_partials(
    q: torch.Tensor,
    shard: KvShard,
    causal: bool,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Partials:
    """`paged_decode` over a shard."""
    return Partials(
        *paged_decode(
            *(q, *shard),
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
    """Attend with this rank's queries to KV on all ranks, and for other ranks to the KV here.

    With NCCL, a new group must have communicated before (a barrier will do): this call need not involve
    all of its ranks.

    Args:
        q: `[own, heads, dim]` or `[own, queries, heads, dim]`, of the sequences of
            `placement.own(rank)`. A rank that owns none passes one of length 0: queries of all ranks
            have the same shape and dtype but for their number.
        shard: what this rank holds.
        placement: the same on all ranks.
        group: of processes; all of them call this. The default is the world.
        attend: attention over a shard. Scores that depend on a token's position in the sequence
            (windows, ALiBi) need a function of one's own, which knows where shards begin.
        out: dense, as `q`, to be written; of q's dtype by default.

    Raises:
        ValueError: `placement` does not fit the group, `q` or `shard`.
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
    asked = query.new_empty(len(held), *query.shape[1:])
    sources = [len(placement.asked(owner, rank)) for owner in range(ranks)]
    for peer, there in enumerate(asked.split(sources)):
        mail.receive([there], peer)
        rows = placement.asked(rank, peer)
        mail.send([query if len(rows) == len(query) else query[rows]], peer)
    mail.deliver()
    partials = _attend(asked, shard, placement.newest(rank), attend)
    merged = _return(mail, partials, sources, query, placement, out)
    lse = merged.lse.squeeze(1) if q.dim() == 3 else merged.lse
    return Attended(merged.out.view(q.shape), lse, mail.sent_bytes)


def _attend(
    asked: torch.Tensor, shard: KvShard, newest: Sequence[bool], attend: Attend
) -> Partials:
    """Partials of all rows: one call, or two if several queries make a difference between rows."""
    if not newest:
        return Partials(asked.float(), asked.new_empty(asked.shape[:-1], dtype=torch.float32))
    if asked.shape[1] == 1 or len(set(newest)) == 1:
        return attend(asked, shard, newest[0])
    out = torch.empty(asked.shape, dtype=torch.float32, device=asked.device)
    lse = out.new_empty(out.shape[:-1])
    for causal in (True, False):
        rows = [row for row, own in enumerate(newest) if own is causal]
        out[rows], lse[rows] = attend(asked[rows], shard.rows(rows), causal)
    return Partials(out, lse)


def _return(
    mail: "_Mail",
    partials: Partials,
    sources: Sequence[int],
    query: torch.Tensor,
    placement: Placement,
    out: torch.Tensor | None,
) -> Partials:
    """Send partials to those who asked, and merge those that come back."""
    asked = {peer: placement.asked(mail.rank, peer) for peer in range(len(sources))}
    asked = {peer: rows for peer, rows in asked.items() if rows}
    outs = query.new_empty(max(1, len(asked)), *query.shape, dtype=torch.float32)
    lses = outs.new_full(outs.shape[:-1], -torch.inf)
    late = []
    for place, (peer, rows) in enumerate(asked.items()):
        whole = len(rows) == len(query)
        there = Partials(*(each[place] if whole else each[place, rows] for each in (outs, lses)))
        mail.receive(there, peer)
        if not whole:  # an indexed tensor is a copy
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
    """Tensors from and to other ranks, posted together; a rank's own are copied."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._group = group
        self._posted: list[dist.P2POp] = []
        self._own: list[list[torch.Tensor]] = [[], []]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Let dense tensors be written by what a peer sends; empty ones do not travel."""
        self._post(dist.irecv, tensors, peer)

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Send tensors to a peer, who receives as many of the same shapes."""
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
        """Wait until everything posted has arrived (with NCCL: let the current stream wait)."""
        for written, read in zip(*self._own, strict=True):
            written.copy_(read)
        for work in dist.batch_isend_irecv(self._posted) if self._posted else ():
            work.wait()
        self._posted.clear()
        self._own = [[], []]
