# SPDX-License-Identifier: Apache-2.0
"""Two processes, and prompts that move from one to the other."""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import zmq

from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.tools.launch import Family
from pd_connector.tools.launch.engine import LINK_ONLY

START_S = 120.0
CALL_S = 180.0
"""Longest time for a party's answer."""
_POLL_MS = 200
_LAST_LINES = 5


class WireRun(NamedTuple):
    """One prompt moved, and verified."""

    seconds: float  # request -> in the consumer's pages
    cpu_s: float  # of both processes
    descriptors: int


class WirePair:
    """Both processes, alive within the `with` block.

    Args:
        tokens: of the prompt.
        env: variables added to both.
        namespaces: where they run; empty for this one.

    Raises:
        BenchError: on entry and later, when a process fails.
    """

    def __init__(
        self,
        tokens: int,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[Namespace] = (),
    ) -> None:
        self._tokens = tokens
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._namespaces = namespaces
        self._numbers = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-wire-")))
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._producer, self._consumer = (
                stack.enter_context(self._party(folder, role, index))
                for index, role in enumerate(("producer", "consumer"))
            )
            for party in (self._producer, self._consumer):
                party.call("used", START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        return [self._producer.pid, self._consumer.pid]

    def open(self, kind: str, settings: Mapping[str, Any]) -> None:
        """Make both sides ready to move KV by a mover of this kind."""
        parties = self._producer, self._consumer
        addresses = [party.call("open", kind=kind, settings=dict(settings)) for party in parties]
        for party, peer in zip(parties, reversed(addresses), strict=True):
            party.call("meet", peer=peer)

    def run(self, lossy: bool | None) -> WireRun:
        """Move the prompt once.

        Args:
            lossy: whether pages may have small errors; None for bytes that are not stored.

        Raises:
            BenchError: it did not arrive, or is wrong.
        """
        self._numbers += 1
        before_s = self._producer.call("offer", number=self._numbers)
        seconds, cpu_s, descriptors = self._consumer.call("fetch", number=self._numbers)
        cpu_s += self._producer.call("used") - before_s
        if lossy is not None and (problem := self._consumer.call("check", lossy=lossy)):
            raise BenchError(f"wrong KV has arrived: {problem}")
        return WireRun(seconds, cpu_s, descriptors)

    def compute(self, kind: str) -> None:
        """From now on a thread of each side computes; see `Busy`."""
        for party in (self._producer, self._consumer):
            party.call("compute", kind=kind)

    def computed(self) -> tuple[int, float]:
        """Stop the computing threads; returns the number of their rounds, and their CPU seconds."""
        results = [party.call("computed") for party in (self._producer, self._consumer)]
        return sum(rounds for rounds, _ in results), sum(cpu_s for _, cpu_s in results)

    def close(self) -> None:
        """Undo `open`."""
        for party in (self._consumer, self._producer):
            party.call("close")

    def _party(self, folder: Path, role: str, index: int) -> "PartyProcess":
        namespace = self._namespaces[index] if self._namespaces else None
        prefix = namespace.prefix if namespace else []
        host = namespace.address if namespace else "127.0.0.1"
        env = {**self._env, **(LINK_ONLY if namespace else {})}
        path, log = folder / role, folder / f"{role}.log"
        program = [sys.executable, "-m", "pd_bench.wire.party"]
        arguments = [str(path), role, str(self._tokens), host]
        family = Family([*prefix, *program, *arguments], env=env, log=log)
        return PartyProcess(family, self._context, path, log)


class Started(Protocol):
    """A process or a family of processes that this process can stop and end."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None: ...


class PartyProcess:
    """One process, as its launcher sees it."""

    def __init__(
        self, family: Started, context: zmq.Context[zmq.Socket[bytes]], path: Path, log: Path
    ) -> None:
        self.family = family
        self._log = log
        self._calls = context.socket(zmq.REQ)
        self._calls.connect(f"ipc://{path}")

    @property
    def pid(self) -> int:
        return self.family.pid

    def call(self, name: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Call a method of the party. Raises BenchError if the call fails, has no answer, or the process has
        ended."""
        self._calls.send(msgspec.msgpack.encode([name, arguments]))
        deadline = time.monotonic() + timeout_s
        while not self._calls.poll(_POLL_MS):
            if self.family.returncode is not None:
                raise BenchError(f"process ended during {name}: {self._last_lines()}")
            if time.monotonic() > deadline:
                raise BenchError(f"no answer to {name} within {timeout_s:g} s")
        error, result = msgspec.msgpack.decode(self._calls.recv())
        if error:
            raise BenchError(f"{name}: {error}")
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # It has nothing to clean up, so SIGKILL is quicker.
        self.family.kill()

    def _last_lines(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
