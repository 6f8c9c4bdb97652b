# SPDX-License-Identifier: Apache-2.0
"""Executes a kernel: all threads of all CTAs at once, in gangs of threads that are at the same instruction."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gangs import JUNK, Code, Gang, Lanes, gang_of, replace_threads, smallest, special_registers
from memory import Array, Clocks, FaultError, GlobalShadow, Memory, SharedShadow
from ptx import Instruction

PATIENCE = 4_000
"""Steps of one gang before another has its turn, because it may wait for the other."""
MOST_POLLS = 3_000
"""Times that all threads do nothing but wait for each other."""
MOST_STEPS = 400_000


@dataclass(eq=False)
class Launch:
    """One launch.

    Attributes:
        parameters: memory from the address PARAMETERS.
        bounds: first and last address of each tensor's memory.
        seed: 0 executes in lockstep. Others divide warps into sets that run at their own pace, and choose among
            them at random.
    """

    code: Code
    parameters: Memory
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    bounds: tuple[Array, Array]
    seed: int = 0
    steps: int = 0
    mbarriers: dict[tuple[int, int], Any] = field(default_factory=dict)
    arrived: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    released: dict[int, Array] = field(default_factory=dict)
    """What atomics with release have told, by address."""
    queue: dict[int, list[Any]] = field(default_factory=dict)
    """Products that a warpgroup has not yet waited for."""
    loads: list[Any] = field(default_factory=list)
    """Loads of the TMA that have not arrived."""

    def __post_init__(self) -> None:
        program = self.code.program
        self.ctas = int(np.prod(self.grid))
        self.total = self.ctas * self.threads
        self.warps_per_cta = self.threads // 32
        lane = np.arange(self.total)
        self.cta, self.thread, self.warp = lane // self.threads, lane % self.threads, lane // 32
        self.lane = lane % 32
        self.registers: list[Array | None] = [None] * len(program.registers)
        kinds = {each.name for each in program.code}
        self.clocks = Clocks(self.ctas, self.warps_per_cta, "mbarrier" in kinds)
        self.shared_bytes = -(-self.shared_bytes // 128) * 128
        self.shared = Memory(np.full(self.shared_bytes * self.ctas, JUNK, np.uint8))
        self.shared_shadow = SharedShadow(
            *(self.clocks, self.shared_bytes, self.ctas, smallest(program, "shared"))
        )
        self.memory = Memory.of_process()
        self.shadow = GlobalShadow(self.clocks, *self.bounds, smallest(program, "global"))
        self.copy_groups = np.zeros(self.clocks.warps, np.int32)
        self.product_groups = np.zeros(self.clocks.warps, np.int32)
        self.idle = 0
        self.exited = np.zeros(self.total, bool)
        self.chance = random.Random(self.seed)
        self.special = special_registers(self.grid, self.threads)
        self.where = program.code[0]
        """The instruction that is being executed."""
        self.together = 4 if "wgmma" in kinds else 1

    def run(self, reached: bytearray) -> None:
        """Execute until all threads have ended, and note which instructions are reached. Raises FaultError."""
        self.reached = reached
        gangs = self._starting()
        lanes = Lanes(self)
        while gangs:
            gang = self._next(gangs)
            self._deliver()
            self._turn(gang, gangs, lanes)
            gangs = self._together([each for each in gangs if each.first < each.last])

    def _starting(self) -> list[Gang]:
        if not self.seed:
            return [Gang(0, 0, self.total, None, 0)]
        units = self.clocks.warps // self.together
        sets = self.chance.choice([2, 4, min(units, 16)])
        chosen = np.array([self.chance.randrange(sets) for _ in range(units)])
        of_thread = chosen[self.warp // self.together]
        return [gang_of(0, of_thread == each, each) for each in np.unique(of_thread).tolist()]

    def _next(self, gangs: list[Gang]) -> Gang:
        """The gang that is furthest behind, so that others come together with it; often another, with a seed."""
        ready = [gang for gang in gangs if gang.state == "ready"]
        if not ready:
            raise FaultError("; ".join(self._stuck(gang) for gang in gangs[:4]))
        rested = [gang for gang in ready if not gang.tired]
        if not rested:
            self.idle += 1
            if self.idle > MOST_POLLS and not self.loads:
                raise FaultError("; ".join(self._stuck(gang) for gang in ready[:4]))
            for gang in ready:
                gang.tired = False
            return self.chance.choice(ready)
        if self.seed:
            chosen = self.chance.choice(rested).warpset
            rested = [gang for gang in rested if gang.warpset == chosen]
        return min(rested, key=lambda gang: gang.at)

    def _stuck(self, gang: Gang) -> str:
        mask = gang.full_mask(self.total)
        warps = np.unique(self.warp[mask]) % self.warps_per_cta
        told = f"warps {sorted(set(warps.tolist()))} of CTA {int(self.cta[mask][0])}"
        before = gang.at - (gang.state == "barrier")
        kinds = {"barrier": "barrier that not all threads reach", "apart": "part of a warp"}
        kind = kinds.get(gang.state, "threads poll for ever")
        return f"{kind}: {told} wait at {self.code.program.code[before]}"

    def _turn(self, gang: Gang, gangs: list[Gang], lanes: Lanes) -> None:
        """Execute a gang until it must wait, or another should come first."""
        others = [
            g for g in gangs if g is not gang and g.warpset == gang.warpset and g.state != "barrier"
        ]
        stops = {other.at for other in others}
        rested = [other.at for other in others if other.state == "ready" and not other.tired]
        behind = min(rested, default=len(self.code.functions))
        left = self.chance.randint(20, 400) if self.seed else PATIENCE
        while left:
            left -= 1
            made = self._step(gang, lanes)
            if made:
                gangs.extend(made)
                return
            if gang.state != "ready" or gang.first >= gang.last:
                self.idle = 0
                return
            if gang.at in stops or gang.at > behind:
                return
            if lanes.impatient:
                break
        self.idle *= lanes.impatient
        lanes.impatient, gang.tired = False, True

    def _step(self, gang: Gang, lanes: Lanes) -> list[Gang]:
        """Execute one instruction; returns gangs that have parted from this one."""
        at = gang.at
        if self.steps > MOST_STEPS:
            raise FaultError(f"no end after {MOST_STEPS} steps, at {self.code.program.code[at]}")
        self.steps += 1
        self.reached[at] = 1
        self.where = instruction = self.code.program.code[at]
        if instruction.lanes > 1 and not self._complete(gang, instruction.lanes):
            gang.state = "apart"
            return []
        lanes.first, lanes.last, lanes.mask = gang.first, gang.last, gang.mask
        guard = self.code.guards[at]
        if guard >= 0:
            register = self.registers[guard]
            if register is None:
                raise FaultError(f"uninitialised: the predicate of {instruction}")
            taken = register[gang.first : gang.last]
            taken = ~taken if instruction.negated else taken
            lanes.mask = taken if gang.mask is None else taken & gang.mask
            if lanes.mask.all():
                lanes.mask = None
        function = self.code.functions[at]
        if function is None:
            return getattr(self, f"_{instruction.name}")(gang, lanes, instruction)
        gang.at = at + 1
        if lanes.mask is None or lanes.mask.any():
            function(lanes)
        return []

    def _complete(self, gang: Gang, unit: int) -> bool:
        """Whether whole warps, or warpgroups, are in a gang, but for threads that have ended."""
        if gang.mask is None and gang.first % unit == gang.last % unit == 0:
            return True
        mask = gang.full_mask(self.total)
        if unit == 128 and self.threads % 128:
            raise FaultError(f"a warpgroup of less than four warps: {self.where}")
        here = mask.reshape(-1, unit)
        there = (mask | self.exited).reshape(-1, unit)
        return bool(there[here.any(1)].all())

    def _bra(self, gang: Gang, lanes: Lanes, instruction: Instruction) -> list[Gang]:
        return self._branch(gang, lanes.mask, self.code.program.labels[instruction.operands[0]])

    def _branch(self, gang: Gang, taken: Array | None, target: int) -> list[Gang]:
        if taken is None or (gang.mask is not None and (taken == gang.mask).all()):
            gang.at = target
            return []
        gang.at += 1
        if not taken.any():
            return []
        wide = np.zeros(self.total, bool)
        wide[gang.first : gang.last] = taken
        rest = gang.full_mask(self.total) & ~wide
        replace_threads(gang, rest)
        return [gang_of(target, wide, gang.warpset)]

    def _brx(self, gang: Gang, lanes: Lanes, instruction: Instruction) -> list[Gang]:
        register, _ = self.code.program.registers[instruction.operands[0]]
        chosen = self.registers[register]
        assert chosen is not None
        table = self.code.program.tables[instruction.operands[1]]
        mask, parted = gang.full_mask(self.total), []
        for place in np.unique(chosen[mask]).tolist():
            target = self.code.program.labels[table[place]]
            parted.append(gang_of(target, mask & (chosen == place), gang.warpset))
        gang.last = gang.first
        return parted

    def _ret(self, gang: Gang, lanes: Lanes, instruction: Instruction) -> list[Gang]:
        leaving = np.zeros(self.total, bool)
        leaving[gang.first : gang.last] = True if lanes.mask is None else lanes.mask
        leaving &= gang.full_mask(self.total)
        self.exited |= leaving
        rest = gang.full_mask(self.total) & ~leaving
        gang.at += 1
        replace_threads(gang, rest)
        return []

    _exit = _ret

    def _bar(self, gang: Gang, lanes: Lanes, instruction: Instruction) -> list[Gang]:
        gang.at += 1
        if "warp" in instruction.modifiers:
            self.clocks.tick(lanes.distinct_warps)
            return []
        number, *count = (self._uniform(each, lanes) for each in instruction.operands)
        gang.state, gang.barrier = "barrier", number
        mask = gang.full_mask(self.total)
        for cta in np.unique(self.cta[mask]).tolist():
            warps = np.unique(self.warp[mask & (self.cta == cta)])
            self.arrived.setdefault((cta, number), []).extend(warps.tolist())
            if len(self.arrived[cta, number]) * 32 >= (count[0] if count else self.threads):
                self.clocks.meet(np.array(self.arrived.pop((cta, number))))
        if all((cta, number) not in self.arrived for cta in np.unique(self.cta[mask]).tolist()):
            gang.state = "ready"
        return []

    _barrier = _bar

    def _uniform(self, operand: str, lanes: Lanes) -> int:
        if operand not in self.code.program.registers:
            return int(operand, 0)
        register = self.registers[self.code.program.registers[operand][0]]
        assert register is not None
        found = np.unique(lanes.of(register))
        if len(found) > 1:
            raise FaultError(f"threads of a gang name several barriers: {self.where}")
        return int(found[0])

    def _together(self, gangs: list[Gang]) -> list[Gang]:
        """Gangs whose barrier has opened are ready again; those at the same instruction become one."""
        kept: dict[tuple[Any, ...], Gang] = {}
        for gang in gangs:
            for part in self._opened(gang) if gang.state == "barrier" else [gang]:
                state = "ready" if part.state == "apart" else part.state
                key = (part.at, state, part.barrier * (state == "barrier"), part.warpset)
                if other := kept.get(key):
                    replace_threads(other, other.full_mask(self.total) | part.full_mask(self.total))
                    other.state, other.tired = state, other.tired and part.tired
                else:
                    kept[key] = part
        found = list(kept.values())
        for gang in found:
            unit = self.code.program.code[gang.at].lanes
            if gang.state == "apart" and self._complete(gang, unit):
                gang.state = "ready"
        return found

    def _opened(self, gang: Gang) -> list[Gang]:
        mask = gang.full_mask(self.total)
        here = np.unique(self.cta[mask]).tolist()
        still = [cta for cta in here if self._waits(gang, cta)]
        closed = mask & np.isin(self.cta, still)
        parts = [gang_of(gang.at, mask & ~closed, gang.warpset)] if (mask & ~closed).any() else []
        if closed.any():
            replace_threads(gang, closed)
            parts.append(gang)
        return parts

    def _waits(self, gang: Gang, cta: int) -> bool:
        """A CTA's warps are all at one barrier, or it has opened for all of them."""
        waiting = self.arrived.get((cta, gang.barrier), [])
        first = int(np.argmax(gang.full_mask(self.total) & (self.cta == cta)))
        return first // 32 in waiting

    def _deliver(self) -> None:
        """Let some of the TMA's loads arrive, in any order."""
        while self.loads and self.chance.random() < 0.3:
            self.loads.pop(self.chance.randrange(len(self.loads)))()
