# SPDX-License-Identifier: Apache-2.0
"""Memory of a launch, and the order in which it is used.

Races are found by vector clocks, which do not depend on the order that a run happens to take. Each warp is an
agent with a clock of its own. The engines that work beside it are agents, too: its copies (`cp.async`), its part of
products (`wgmma`), and each mbarrier's loads (TMA). A warp knows of each agent up to a clock; barriers,
mbarriers, waits, and atomics with release and acquire pass this knowledge on. Whatever two agents do to the
same bytes, the later one must know of the earlier.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

FIRST = 4096
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
MBARRIERS = 32
"""mbarriers of a CTA, at most."""
Array = np.ndarray
NOWHERE = np.bool_(False)


class FaultError(Exception):
    """What a kernel must not do, with the instruction and its line."""


class Memory:
    """Bytes, as elements of each size. Addresses are counted from `first`."""

    def __init__(self, data: Array, first: int = 0) -> None:
        self.views = {size: data[: len(data) // size * size].view(t) for size, t in TYPES.items()}
        self.first = first

    @classmethod
    def of_process(cls) -> "Memory":
        """All memory of this process, by address."""
        told = {"data": (FIRST, False), "shape": ((1 << 47) - 2 * FIRST,), "typestr": "|u1"}
        everything = SimpleNamespace(__array_interface__={**told, "version": 3})
        return cls(np.asarray(everything), FIRST)

    def load(self, addresses: Array, size: int) -> Array:
        return self.views[size][(addresses - self.first) // size]

    def store(self, addresses: Array, values: Array, size: int) -> None:
        self.views[size][(addresses - self.first) // size] = values


class Clocks:
    """How much warps know of agents.

    `known[0, warp, agent]` is the last moment of the agent that comes before what the warp does now. The same of
    `known[1]`, behind a fence of proxies, so that products and TMA see it as well. Agents: warps, their copies,
    their products, and mbarriers.
    """

    def __init__(self, ctas: int, warps: int, mbarriers: bool) -> None:
        self.warps = ctas * warps
        """All warps of the launch; the first agents."""
        self.per_cta = warps
        agents = 3 * self.warps + ctas * MBARRIERS * mbarriers
        self.known = np.zeros((2, self.warps, agents), np.int32)
        self.tick(np.arange(self.warps))

    def copies(self, warps: Any) -> Any:
        return self.warps + warps

    def products(self, warps: Any) -> Any:
        """The agent of a warp's part of its warpgroup's products, for which only this warp can wait."""
        return 2 * self.warps + warps

    def loads(self, cta: int, mbarrier: int) -> int:
        assert mbarrier < MBARRIERS
        return 3 * self.warps + cta * MBARRIERS + mbarrier

    def now(self, warps: Array) -> Array:
        return self.known[0, warps, warps]

    def tick(self, warps: Array) -> None:
        self.known[0, warps, warps] += 1

    def meet(self, warps: Array) -> None:
        """All of them know what one of them knows."""
        self.known[:, warps] = self.known[:, warps].max(1, keepdims=True)
        self.tick(warps)

    def release(self, warps: Array) -> Array:
        """What these warps know, for others to learn."""
        told: Array = self.known[:, warps].max(1)
        self.tick(warps)
        return told

    def learn(self, warps: Array, told: Array) -> None:
        self.known[:, warps] = np.maximum(self.known[:, warps], told[:, None])

    def fence_proxies(self, warps: Array) -> None:
        self.known[1, warps] = np.maximum(self.known[1, warps], self.known[0, warps])
        self.tick(warps)


class SharedShadow:
    """For each piece of shared memory of all CTAs: by whom it was written last and when, and when each agent of its
    CTA read it. A piece is as large as the kernel's smallest access, up to 4 bytes."""

    def __init__(self, clocks: Clocks, nbytes: int, ctas: int, piece: int) -> None:
        self.clocks, self.piece = clocks, piece
        pieces = -(-nbytes // piece) * ctas
        self.writer = np.full(pieces, -1, np.int32)
        self.lane = np.zeros(pieces, np.int8)
        self.written = np.zeros(pieces, np.int32)
        self.warps = clocks.per_cta
        self.reads = np.zeros((pieces, 2 * self.warps), np.int32)
        every = np.arange(clocks.warps)[:, None]
        own = every // self.warps * self.warps + np.arange(self.warps)
        self.readers = every, np.concatenate([own, clocks.products(own)], 1)
        """For each warp, the agents that read its CTA's memory: warps, then their products."""
        self.reader = np.full((pieces, self.warps), -1, np.int8)
        """The last thread of each warp that read a piece; -1: nobody, or a warp as a whole."""

    def pieces(self, addresses: Array, size: int) -> Array:
        """[lanes, pieces of an access]."""
        found: Array = addresses[:, None] // self.piece + np.arange(max(1, size // self.piece))
        return found

    def read(
        self, warps: Array, lanes: Array, pieces: Array, where: object, alone: bool = True
    ) -> None:
        """Threads read, each alone or a warp as a whole. What another thread of their warp wrote, they see behind
        `bar.warp.sync` or a barrier."""
        writer, written = self._come_before(warps, pieces, 0, where)
        now = self.clocks.now(warps)[:, None]
        beside = (writer == warps[:, None]) & (written == now)
        if (beside & (self.lane[pieces] != lanes[:, None])).any():
            raise FaultError(
                f"race: another thread of the warp wrote this, without bar.warp.sync: {where}"
            )
        own = (warps % self.warps)[:, None]
        self.reads[pieces, own] = now
        self.reader[pieces, own] = lanes[:, None] if alone else -1

    def _come_before(
        self, warps: Array, pieces: Array, proxy: int, where: object
    ) -> tuple[Array, Array]:
        """Raise FaultError for what warps do not know of. Returns by whom pieces were written, and when."""
        writer, written = self.writer[pieces], self.written[pieces]
        if writer.min() < 0:
            raise FaultError(f"uninitialised: shared memory is read that nothing wrote: {where}")
        known = self.clocks.known[proxy, warps[:, None], writer]
        if proxy:  # what the TMA has loaded is seen without a fence
            loaded = writer >= 3 * self.clocks.warps
            known = np.where(loaded, self.clocks.known[0, warps[:, None], writer], known)
        if (late := known < written).any():
            if proxy and (self.clocks.known[0, warps[:, None], writer] >= written).all():
                raise FaultError(
                    f"race: no fence.proxy.async since shared memory was written: {where}"
                )
            raise FaultError(
                f"race: shared memory is read {self._told(np.broadcast_to(writer, late.shape)[late])}: {where}"
            )
        return writer, written

    def _told(self, writers: Array) -> str:
        kinds = ("another warp wrote it", "a copy is under way to it", "", "the TMA is loading it")
        kind = min(int(writers[0]) // self.clocks.warps, 3)
        return f"while {kinds[kind]}, without a barrier or a wait between"

    def read_by_products(self, warps: Array, pieces: Array, moment: int, where: object) -> None:
        """A warpgroup's products read operands. All its warps must come behind what was written."""
        self._come_before(warps, pieces[None], 1, where)
        self.reads[pieces[:, None], self.warps + warps % self.warps] = moment

    def write(
        self,
        warps: Array,
        pieces: Array,
        where: object,
        lanes: Any = None,
        agents: Any = None,
        moments: Any = None,
        same: Any = NOWHERE,
        fenced: bool = False,
    ) -> None:
        """Warps write, or `agents` that they have told to. `same`: lanes whose values are there already. `fenced`:
        what threads have written must lie behind a fence of proxies."""
        writer = self.writer[pieces]
        known = self.clocks.known[0, warps[:, None], np.maximum(writer, 0)]
        if ((writer >= 0) & (known < self.written[pieces]) & ~same[..., None]).any():
            raise FaultError(
                f"race: shared memory is written twice without a barrier between: {where}"
            )
        if fenced:
            known = self.clocks.known[1, warps[:, None], np.maximum(writer, 0)]
            of_threads = (writer >= 0) & (writer < 2 * self.clocks.warps)
            if (of_threads & (known < self.written[pieces])).any():
                raise FaultError(
                    f"race: no fence.proxy.async since threads wrote to shared memory: {where}"
                )
        readers = self.clocks.known[0][self.readers][warps][:, None]
        if (self.reads[pieces] > readers).any():
            raise FaultError(f"race: shared memory is written that others still read: {where}")
        if lanes is not None:
            self._behind_reads(warps, lanes, pieces, where)
            self.lane[pieces] = lanes[:, None]
        self.writer[pieces] = (warps if agents is None else agents)[:, None]
        self.written[pieces] = (self.clocks.now(warps) if moments is None else moments)[:, None]

    def _behind_reads(self, warps: Array, lanes: Array, pieces: Array, where: object) -> None:
        own = (warps % self.warps)[:, None]
        reader, now = self.reader[pieces, own], self.clocks.now(warps)[:, None]
        beside = (reader >= 0) & (reader != lanes[:, None])
        if (beside & (self.reads[pieces, own] == now)).any():
            raise FaultError(
                f"race: another thread of the warp still reads this, without bar.warp.sync: {where}"
            )


class GlobalShadow:
    """As `SharedShadow`, for the memory of tensors; of readers it keeps the last, but all that used atomics."""

    def __init__(self, clocks: Clocks, starts: Array, ends: Array, piece: int) -> None:
        self.clocks, self.piece = clocks, piece
        self.starts, self.ends = starts, ends
        self.first = np.concatenate([[0], np.cumsum(-(-(ends - starts) // piece) + 1)])
        count = int(self.first[-1])
        self.writer, self.written, self.reader, self.read_at = np.zeros((4, count), np.int32)
        self.atomic = np.zeros(count, bool)
        self.counted: dict[int, dict[int, int]] = {}
        """When each warp used a piece last, of those that were used by atomics."""
        self.reach: Any = None
        """Told what an instruction touches; raises FaultError if it must not (`extents.py`)."""

    def check(
        self,
        warps: Array,
        addresses: Array,
        size: int,
        where: object,
        *,
        write: bool,
        atomic: bool = False,
        same: Any = NOWHERE,
    ) -> None:
        """Raise FaultError if warps must not access these addresses. `same`: lanes whose values are there already."""
        if (addresses % size).any():
            raise FaultError(f"misaligned access of {size} bytes to global memory: {where}")
        kind = "written" if write else "read"
        place = np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)
        past = np.maximum(addresses + size - self.ends[place], self.starts[place] - addresses)
        if (past > 0).any():
            worst = int(past.max())
            raise FaultError(f"out of bounds: {kind} {worst} bytes from any tensor: {where}")
        pieces = (self.first[place] + (addresses - self.starts[place]) // self.piece)[:, None]
        pieces = pieces + np.arange(max(1, size // self.piece))
        if self.reach is not None:
            self.reach(where, pieces)
        self._order(warps, pieces, f"{kind}: {where}", same, write=write, atomic=atomic)

    def _order(
        self, warps: Array, pieces: Array, where: str, same: Any, *, write: bool, atomic: bool
    ) -> None:
        known = self.clocks.known[0]
        late = known[warps[:, None], self.writer[pieces]] < self.written[pieces]
        late &= ~(self.atomic[pieces] if atomic else same[..., None])
        if late.any():
            raise FaultError(
                f"race: global memory that another warp wrote, in no order to it, is {where}"
            )
        if atomic:
            self._count(warps, pieces)
        elif write and self.atomic[pieces].any():
            self._uncount(warps, pieces, where)
        if not write:
            self.reader[pieces] = warps[:, None]
            self.read_at[pieces] = np.where(atomic, 0, self.clocks.now(warps))[:, None]
            return
        late = known[warps[:, None], self.reader[pieces]] < self.read_at[pieces]
        if late.any() and not atomic:
            raise FaultError(
                f"race: global memory that another warp reads, in no order to it, is {where}"
            )
        self.writer[pieces] = warps[:, None]
        self.written[pieces] = self.clocks.now(warps)[:, None]
        self.atomic[pieces] = atomic

    def _count(self, warps: Array, pieces: Array) -> None:
        now = self.clocks.now(warps).tolist()
        for warp, piece, moment in zip(warps.tolist(), pieces[:, 0].tolist(), now, strict=True):
            self.counted.setdefault(piece, {})[warp] = moment

    def _uncount(self, warps: Array, pieces: Array, where: str) -> None:
        """A store needs to come behind all atomics, not only the last."""
        for warp, piece in zip(warps.tolist(), pieces[:, 0].tolist(), strict=True):
            known = self.clocks.known[0, warp]
            for other, moment in self.counted.pop(piece, {}).items():
                if known[other] < moment:
                    raise FaultError(
                        f"race: global memory that another warp uses by atomics, in no order to it, is {where}"
                    )
