# SPDX-License-Identifier: Apache-2.0
"""Which ranks ask for sequences and which hold their KV: pure, the same on all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where the queries and the KV of a batch lie; ranks are those of the group.

    Attributes:
        owners: of each sequence, the rank that has its queries and gets its result.
        holders: of each sequence, the ranks that hold some of its KV, in the order of its tokens: the
            last one has those of the queries themselves. None: the result is that of empty shards.
    """

    owners: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def check(self, ranks: int) -> None:
        """Raise ValueError for ranks that are not in the group, or are named twice."""
        if len(self.owners) != len(self.holders):
            raise ValueError(
                f"{len(self.owners)} owners, {len(self.holders)} holders: want one of each per sequence"
            )
        for owner, holders in zip(self.owners, self.holders, strict=True):
            if not all(0 <= rank < ranks for rank in (owner, *holders)):
                raise ValueError(f"owner {owner}, holders {holders}: the group has {ranks} ranks")
            if len(set(holders)) != len(holders):
                raise ValueError(f"holders {holders}: a rank's KV of a sequence is one shard")

    def own(self, rank: int) -> list[int]:
        """Sequences whose queries a rank has, in their order in `q`."""
        return [sequence for sequence, owner in enumerate(self.owners) if owner == rank]

    def held(self, rank: int) -> list[int]:
        """Sequences a rank holds KV of, in the order of its shard's rows: by owner, then by number."""
        found = [sequence for sequence, ranks in enumerate(self.holders) if rank in ranks]
        return sorted(found, key=lambda sequence: self.owners[sequence])

    def asked(self, owner: int, holder: int) -> list[int]:
        """Rows of an owner's queries that a holder attends with."""
        own = enumerate(self.own(owner))
        return [row for row, sequence in own if holder in self.holders[sequence]]

    def newest(self, rank: int) -> list[bool]:
        """Of each row of a rank's shard, whether it ends with the queries' own tokens."""
        return [self.holders[sequence][-1] == rank for sequence in self.held(rank)]
