# SPDX-License-Identifier: Apache-2.0
"""Faults of one kind over one transport, in rounds of a few transfers. Every transfer is compared."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from chaos.faults import (
    AT_ONCE,
    DEADLINE_S,
    HELD_S,
    RECORD_FAULTS,
    RECOVERY_S,
    SETTLE_S,
    Fault,
)
from chaos.ledger import Ledger
from chaos.ranks import Ranks
from chaos.transfers import Transfers
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_bench.wire.pair import PartyProcess
from pd_connector.tools.launch.service import LINK

TRANSFERS = 6
"""Transfers at once in a round."""
CHUNK_TRANSFERS = 16
"""Transfers at once in a round of faults that hit chunks. More transfers share the wait for a deadline."""
_CHUNK_SHARE, _RECORD_SHARE = 0.3, 0.03
"""Fractions of chunks and of records that are hit. A hit record costs the connection, with all other transfers on
it."""
_ANY_TIME = 2
"""Transfers of a round whose pages are taken back at any time, twice."""
LIES = 40
"""Messages of one liar."""
_PAUSES_S = (0.02, 0.1, 0.3, 0.7, 1.5)
"""Durations of a standstill: some end before a timeout notices, others after."""


@dataclass(frozen=True)
class Limits:
    """The limits of one cell.

    Args:
        faults: the number of faults to inject.
        seconds: the time after which the cell ends with any number of faults.
    """

    faults: int
    seconds: float = float("inf")


class Campaign:
    """One cell of the table.

    Args:
        ranks: running ranks that nothing else uses.
        fault: what is injected.
        seed: seed of the random choices. With the same seed the same faults hit the same transfers, if processes run in
            the same order.
        link: the producer's side of a link that can be cut, for `Fault.PARTITION`.
    """

    def __init__(
        self, ranks: Ranks, fault: Fault, seed: int, link: Namespace | None = None
    ) -> None:
        self._ranks = ranks
        self._fault = fault
        self._random = random.Random(seed)
        self._link = link
        self._transfers = Transfers(ranks, self._random, apart=fault is Fault.TAKE_BACK)
        self._ledger = Ledger(fault, ranks.setup.name)

    def run(self, limits: Limits) -> Ledger:
        """Inject, compare, and count."""
        ledger, began = self._ledger, time.monotonic()
        try:
            self._recover()
            for _ in range(2):  # every slot is used once before, so this is not growth
                self._collect(self._transfers.begin(CHUNK_TRANSFERS))
            self._recover()  # a session stands, like at the end
            ledger.ok, ledger.slowest_s = 0, 0.0  # the first session is not a recovery
            ledger.recomputed.clear()
            before, paths = self._census(), self._paths()
            while ledger.injected < limits.faults and time.monotonic() - began < limits.seconds:
                self._round(limits.faults - ledger.injected)
                self._recover()
            ledger.paths = self._paths() - paths
            ledger.held = self._held()
            ledger.growth = self._growth(before)
        except BenchError as error:
            ledger.lost += 1
            ledger.note = str(error)
        ledger.seconds = time.monotonic() - began
        return ledger

    def _round(self, left: int) -> None:
        """A few transfers, with faults while they run."""
        if self._fault.armed:
            self._armed_round(left)
            return
        for consumer in self._ranks.consumers:  # so that chunks are on their way when it happens
            consumer.call("arm", fault=Fault.DELAY, count=1000, share=0.7)
        if self._random.random() < 0.5:
            expected = self._transfers.begin(TRANSFERS)
            self._inject(expected, left, within_s=0.02)
        else:  # before there is anything to send
            expected, offer = self._transfers.begin_waiting(TRANSFERS)
            self._inject(expected, left, within_s=0.01)
            offer()
        self._collect(expected)
        for consumer in self._ranks.consumers:
            consumer.call("disarm")

    def _armed_round(self, left: int) -> None:
        """A few transfers that the agents themselves hit."""
        takes_back = self._fault is Fault.TAKE_BACK
        share = _RECORD_SHARE if self._fault in RECORD_FAULTS else _CHUNK_SHARE
        hit = self._ranks.all if takes_back else self._ranks.consumers
        for one in hit:
            one.call("arm", fault=self._fault, count=min(left, CHUNK_TRANSFERS), share=share)
        if takes_back:
            self._take_back_in_round()
        else:
            self._collect(self._transfers.begin(CHUNK_TRANSFERS))
        self._ledger.injected += sum(one.call("disarm") for one in hit)
        if takes_back:
            self._ledger.wrong += sum(one.call("spoilt") for one in self._ranks.all)

    def _take_back_in_round(self) -> None:
        """Prefills that go on while their pages are sent. Some are preempted in the middle of a copy, others at any
        time."""
        draws = self._transfers.draw(CHUNK_TRANSFERS)
        self._transfers.offer(draws, final=False)
        expected = self._transfers.load(draws, wait=False)
        for name, _, _ in self._random.sample(draws, _ANY_TIME):
            time.sleep(self._random.uniform(0, 0.01))
            self._ledger.injected += self._anyone().call("take_back", names=[name])
        self._transfers.offer(draws, final=True)
        for name, _, _ in self._random.sample(draws, _ANY_TIME):
            time.sleep(self._random.uniform(0, 0.005))
            self._ledger.injected += self._anyone().call("take_back", names=[name])
        self._collect(expected)

    def _inject(self, expected: list[set[str]], left: int, within_s: float) -> None:
        """Longest time between two faults that hit no chunk, in seconds."""
        for _ in range(min(left, AT_ONCE.get(self._fault, 1))):
            time.sleep(self._random.uniform(0, within_s))
            self._ledger.injected += self._injectors[self._fault](expected)

    def _recover(self) -> None:
        """Run transfers until one arrives. Note the time."""
        began = time.monotonic()
        while True:
            before = self._ledger.ok
            self._collect(self._transfers.begin(1))
            if self._ledger.ok - before == len(self._ranks.consumers):
                break
            if time.monotonic() - began > RECOVERY_S:
                self._ledger.lost += 1
                raise BenchError(f"nothing has arrived for {RECOVERY_S:g} s")
        self._ledger.slowest_s = max(self._ledger.slowest_s, time.monotonic() - began)

    def _collect(self, expected: list[set[str]]) -> None:
        """Wait for all loads to end. Loads without an outcome are lost."""
        deadline = time.monotonic() + DEADLINE_S
        for consumer, names in zip(self._ranks.consumers, expected, strict=True):
            while names:
                left_s = deadline - time.monotonic()
                for name, cause, right in consumer.call("outcomes", within_s=max(0.0, left_s)):
                    if name in names:
                        names.remove(name)
                        self._ledger.count(cause, right)
                if left_s < 0:
                    self._ledger.lost += len(names)
                    break
        for producer in self._ranks.producers:
            producer.call("outcomes", within_s=0.0)

    def _held(self) -> int:
        """Resources still held when no request is left and every lease has ended."""
        deadline = time.monotonic() + HELD_S
        while True:
            held = [one.call("held") for one in self._ranks.all]
            count = round(sum(sum(one.values()) for one in held))
            if not count or time.monotonic() > deadline:
                if count:
                    self._ledger.note = f"held: {[one for one in held if one]}"
                return count
            time.sleep(0.1)

    def _census(self) -> dict[int, tuple[int, int, int]]:
        return {one.pid: tuple(one.call("census")) for one in self._ranks.all}

    def _growth(self, before: dict[int, tuple[int, int, int]]) -> tuple[int, int, int]:
        """Growth of the processes that have lived since the start. It is measured when only sessions are open and the
        system has ended silent connections."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = {pid: counts for pid, counts in self._census().items() if pid in before}
            rows = [[n - b for n, b in zip(now[pid], before[pid], strict=True)] for pid in now]
            columns = zip(*rows, strict=True) if rows else ((0,), (0,), (0,))
            files, threads, kib = (max(column) for column in columns)
            if files <= 0 or time.monotonic() > deadline:
                return files, threads, kib
            time.sleep(0.1)

    def _paths(self) -> Counter[str]:
        return sum((Counter(one.call("paths")) for one in self._ranks.all), Counter())

    def _anyone(self) -> PartyProcess:
        return self._random.choice(self._ranks.all)

    @property
    def _injectors(self) -> dict[Fault, Callable[[list[set[str]]], int]]:
        """Each function returns the number of faults that it injected."""
        return {
            Fault.LIE_MESSAGE: self._lie,
            Fault.RESET: self._reset,
            Fault.HALF_OPEN: lambda _: bool(self._anyone().call("silence")),
            Fault.SLOW_READER: self._read_slowly,
            Fault.STOP: self._stop,
            Fault.KILL: self._kill,
            Fault.DESCRIPTORS: self._exhaust,
            Fault.CLOCK: self._jump,
            Fault.PARTITION: self._part,
        }

    def _lie(self, expected: list[set[str]]) -> int:
        teller, port = (
            self._random.choice(self._ranks.consumers),
            self._random.choice(self._ranks.ports),
        )
        names = sorted(expected[0])
        host = self._ranks.hosts[0]
        return int(teller.call("lie", host=host, port=port, names=names, count=LIES))

    def _reset(self, expected: list[set[str]]) -> int:
        # If the accepting side resets a connection, UCX does not notice, unlike with a real network. So the producer
        # resets it.
        over_ucx = "ucx" in self._ranks.setup.config["transports"]
        process = self._random.choice(self._ranks.producers) if over_ucx else self._anyone()
        return bool(process.call("reset"))

    def _read_slowly(self, expected: list[set[str]]) -> int:
        consumer = self._random.choice(self._ranks.consumers)
        for _ in range(10):
            consumer.family.pause()
            time.sleep(0.02)
            consumer.family.resume()
            time.sleep(0.002)
        return 1

    def _stop(self, expected: list[set[str]]) -> int:
        family = self._anyone().family
        family.pause()
        time.sleep(self._random.choice(_PAUSES_S))
        family.resume()
        return 1

    def _kill(self, expected: list[set[str]]) -> int:
        process = self._anyone()
        if process in self._ranks.consumers:  # its engine and requests died with it
            expected[self._ranks.consumers.index(process)].clear()
        self._ranks.restart(process)
        return 1

    def _exhaust(self, expected: list[set[str]]) -> int:
        """Transfers without free descriptors, with connections that must be opened again."""
        process = self._anyone()
        taken = process.call("exhaust")
        process.call("reset")
        self._collect(expected)
        self._collect(self._transfers.begin(1))
        process.call("relieve")
        return bool(taken)

    def _jump(self, expected: list[set[str]]) -> int:
        self._anyone().call("jump", seconds=self._random.choice((0.1, 1.0, 5.0, 3600.0)))
        return 1

    def _part(self, expected: list[set[str]]) -> int:
        assert self._link is not None
        set_link = ["ip", "-n", self._link.name, "link", "set", LINK]
        subprocess.run([*set_link, "down"], check=True, capture_output=True)
        time.sleep(self._random.choice(_PAUSES_S))
        subprocess.run([*set_link, "up"], check=True, capture_output=True)
        return 1
