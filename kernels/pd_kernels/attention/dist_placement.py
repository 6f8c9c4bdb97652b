# SPDX-License-Identifier: Apache-2.0
"""The owner of a sequence and the holders of its KV: pure functions, with the same result on all
ranks."""

from dataclasses import dataclass


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
        found = [sequence for sequence, ranks in enumerate(self.holders) if rank in ranks]
        return sorted(found, key=lambda sequence: self.owners[sequence])

    def asked(self, owner: int, holder: int) -> list[int]:
        """The rows of an owner's queries that a holder attends with."""
        own = enumerate(self.own(owner))
        return [row for row, sequence in own if holder in self.holders[sequence]]

    def newest(self, rank: int) -> list[bool]:
        """For each row of a rank's shard, whether the shard ends with the queries' own tokens."""
        return [self.holders[sequence][-1] == rank for sequence in self.held(rank)]
