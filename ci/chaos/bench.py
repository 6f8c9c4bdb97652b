# SPDX-License-Identifier: Apache-2.0
"""Every fault over every transport. Controls run first, because a blind bench proves nothing."""

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from chaos.blind import BYTES, PAGES
from chaos.campaign import Campaign, Limits
from chaos.faults import RECORD_FAULTS, Fault
from chaos.ledger import Ledger, merged
from chaos.nursery import Nursery
from chaos.ranks import SETUPS, Ranks, Setup
from pd_bench.netns import Bed, Namespace, available
from pd_bench.report import BenchError

CONTROL_FAULTS = 20
CONTROLS = (
    ("tcp", Fault.CORRUPT, BYTES),
    ("tcp key", Fault.CORRUPT, BYTES),
    ("tcp key", Fault.TAKE_BACK, PAGES),
)
"""Setup, fault, and the guard that is taken off. With these, wrong pages must be found."""
_NEEDS = {"nixl": "nixl", "ucx": "ucxx"}
_PULLED = ("shm", "shm TP 2")
"""Setups in which consumers read pages in place. A chunk then has no header on its way, and chunks cannot overtake each
other."""
_CUTTABLE = tuple(name for name, setup in SETUPS.items() if setup.has_records)
"""Setups with a cut link. One transport is enough, because this tests sessions."""


@dataclass(frozen=True)
class ChaosBench:
    """The plan of a bench.

    Args:
        setups: names of `SETUPS`.
        faults: kinds.
        limits: of each cell, all pairs together.
        seed: seed of all random choices.
        pairs: pairs of engines that run at a time. Most faults cost waiting time, not CPU time.
    """

    setups: Sequence[str]
    faults: Sequence[Fault]
    limits: Limits
    seed: int
    pairs: int = 1

    def run(self, say: Callable[[str], None]) -> Iterator[Ledger]:
        """Yield each cell at its end.

        Raises:
            BenchError: the control found no wrong page, although there were some.
        """
        with Nursery() as nursery:
            for name, fault, guard in CONTROLS:
                control(self.seed, nursery, name, fault, guard)
            say(f"controls: without its guards wrong pages are found; seed {self.seed}")
            for name in self.setups:
                for fault in self.faults:
                    if why := skipped(name, fault):
                        say(f"{fault} over {name}: not run ({why})")
                        continue
                    say(f"{fault} over {name}")
                    yield self._cell(SETUPS[name], fault, nursery)

    def _cell(self, setup: Setup, fault: Fault, nursery: Nursery) -> Ledger:
        faults = [len(range(n, self.limits.faults, self.pairs)) for n in range(self.pairs)]
        with ThreadPoolExecutor(self.pairs) as threads:
            parts = [
                threads.submit(self._pair, setup, fault, number, share, nursery)
                for number, share in enumerate(faults)
                if share
            ]
            try:
                return merged([part.result() for part in parts])
            except BaseException:
                nursery.kill()  # the other pairs end too
                raise

    def _pair(
        self, setup: Setup, fault: Fault, number: int, faults: int, nursery: Nursery
    ) -> Ledger:
        chosen = f"{self.seed} {setup.name} {fault}" + (f" {number}" if number else "")
        seed = random.Random(chosen).randrange(1 << 31)
        limits = Limits(faults, self.limits.seconds)
        with ExitStack() as stack:
            sides: Sequence[Namespace] = ()
            if fault is Fault.PARTITION:
                sides = stack.enter_context(Bed()).namespaces
            wired = fault.on_wire and setup.has_records
            ranks = stack.enter_context(Ranks(setup, seed, nursery, wired=wired, namespaces=sides))
            return Campaign(ranks, fault, seed, link=sides[0] if sides else None).run(limits)


def control(seed: int, nursery: Nursery, setup: str, fault: Fault, guard: str) -> Ledger:
    """Do a fault to agents with a guard taken off.

    Returns:
        The number of wrong pages found.

    Raises:
        BenchError: nothing was found.
    """
    wired = fault.on_wire
    with Ranks(SETUPS[setup], seed, nursery, wired=wired, blind_to=guard) as ranks:
        found = Campaign(ranks, fault, seed).run(Limits(CONTROL_FAULTS))
    if not found.wrong:
        raise BenchError(
            f"this check finds no faults: {found.injected} faults ({fault} over {setup}) with nothing that guards "
            f"{guard}, and no page was found wrong ({found.note})"
        )
    return found


def skipped(setup: str, fault: Fault) -> str:
    """The reason why a cell is not run here; empty if it is run."""
    (transport,) = SETUPS[setup].config["transports"]
    if fault in RECORD_FAULTS and not SETUPS[setup].has_records:
        return "only tcp has records of its own"
    module = _NEEDS.get(transport)
    if module and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if setup in _PULLED and fault in (Fault.REORDER, Fault.LIE_HEADER):
        return "chunks are read from pages; `shm slots`, with TP 2, too, and `shm writes` have it"
    if fault is Fault.PARTITION:
        return available() if setup in _CUTTABLE else "links are cut over tcp only"
    return ""
