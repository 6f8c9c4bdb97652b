# SPDX-License-Identifier: Apache-2.0
"""`bench chaos`: every fault over every transport, and first the control: a bench that cannot see is no bench."""

import importlib.util
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from pd_connector.tools.bench.chaos.campaign import Campaign, Limits
from pd_connector.tools.bench.chaos.faults import Fault
from pd_connector.tools.bench.chaos.ledger import Ledger, merged
from pd_connector.tools.bench.chaos.nursery import Nursery
from pd_connector.tools.bench.chaos.ranks import SETUPS, Ranks, Setup
from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.launch.netns import Bed, available

CONTROL_FAULTS = 20
_NEEDS = {"nixl": "nixl", "ucx": "ucxx"}
_PULLED = ("shm", "shm TP 2")
"""Setups in which consumers read pages where they lie: a chunk has no header on its way there, and none overtakes another."""
_CUTTABLE = ("tcp",)
"""Setups with which a link is cut: one transport is enough, for what is tested are sessions."""


@dataclass(frozen=True)
class ChaosBench:
    """What is done.

    Args:
        setups: names of `SETUPS`.
        faults: kinds.
        limits: of each cell, all pairs together.
        seed: of everything that is drawn.
        pairs: of engines that run at a time. Most faults cost time and not a processor.
    """

    setups: Sequence[str]
    faults: Sequence[Fault]
    limits: Limits
    seed: int
    pairs: int = 1

    def run(self, say: Callable[[str], None]) -> Iterator[Ledger]:
        """Yield each cell when it has ended.

        Raises:
            BenchError: the control found nothing wrong, although it was.
        """
        with Nursery() as nursery:
            control(self.seed, nursery)
            say(f"control: without checksums wrong pages are found; seed {self.seed}")
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
                nursery.kill()  # the other pairs end, too
                raise

    def _pair(
        self, setup: Setup, fault: Fault, number: int, faults: int, nursery: Nursery
    ) -> Ledger:
        chosen = f"{self.seed} {setup.name} {fault}" + (f" {number}" if number else "")
        seed = random.Random(chosen).randrange(1 << 31)
        limits = Limits(faults, self.limits.seconds)
        with ExitStack() as stack:
            if fault is not Fault.PARTITION:
                ranks = stack.enter_context(Ranks(setup, seed, nursery))
                return Campaign(ranks, fault, seed).run(limits)
            sides = stack.enter_context(Bed()).namespaces
            key = secrets.token_hex(32)
            ranks = stack.enter_context(Ranks(setup, seed, nursery, namespaces=sides, key=key))
            return Campaign(ranks, fault, seed, link=sides[0]).run(limits)


def control(seed: int, nursery: Nursery) -> Ledger:
    """Damage chunks of a consumer that does not compare checksums.

    Returns:
        What was found: wrong pages.

    Raises:
        BenchError: nothing was found.
    """
    with Ranks(SETUPS["tcp"], seed, nursery, credulous=True) as ranks:
        found = Campaign(ranks, Fault.CORRUPT, seed).run(Limits(CONTROL_FAULTS))
    if not found.wrong:
        raise BenchError(
            f"the bench is blind: {found.injected} chunks were damaged, no checksum was compared, and no "
            f"page was found wrong ({found.note})"
        )
    return found


def skipped(setup: str, fault: Fault) -> str:
    """Why a cell is not run here; empty if it is."""
    (transport,) = SETUPS[setup].config["transports"]
    module = _NEEDS.get(transport)
    if module and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if setup in _PULLED and fault in (Fault.REORDER, Fault.LIE_HEADER):
        return "chunks are read from pages; `shm slots`, with TP 2, too, and `shm writes` have it"
    if fault is Fault.PARTITION:
        return available() if setup in _CUTTABLE else "links are cut over tcp only"
    return ""
