# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank, as its engine sees it: commands go in, outcomes come out.

The work is done by one thread, `pd-agent` (`agent_thread`), which runs a `Loop`.
"""

import atexit
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from pd_connector.agent.agent_thread import AgentThread
from pd_connector.agent.commands import (
    ChangeModel,
    Command,
    CommandQueue,
    Computed,
    Drop,
    KnowWeights,
    Revoke,
    Withdraw,
)
from pd_connector.agent.engine_steps import EngineSteps
from pd_connector.agent.handshake import RankIdentity
from pd_connector.agent.loop import Loop
from pd_connector.agent.metrics import UNDER_WAY
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import Outcome, PendingOutcomes
from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import model_root
from pd_connector.pool.part_names import draft_mark
from pd_connector.pool.store.base import Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.protocol.consuming.audit import AuditBook
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport
from pd_connector.transport.choice import choose, this_machine, with_names


class Closable(Protocol):
    """What can be closed, more than once."""

    def close(self) -> None: ...


_open: "weakref.WeakKeyDictionary[Closable, int]" = weakref.WeakKeyDictionary()
"""What is to be closed, with the id of the process that made it. A process that is forked later does not
have its thread."""


def close_at_exit(made: Closable) -> None:
    """Close this when the interpreter ends."""
    _open[made] = os.getpid()


@atexit.register
def _close_all() -> None:
    for made, process in list(_open.items()):
        if process == os.getpid():
            made.close()


class TakenBack:
    """The gate is shut once for every command that takes pages back, and the agent's thread opens it
    once for each: an engine may announce a command before it submits it. Used by the engine's thread.

    Args:
        shut: shuts the gate of a request.
    """

    def __init__(self, shut: Callable[[str], None]) -> None:
        self._shut = shut
        self._announced: list[Command] = []

    def announced(self, command: Command) -> None:
        """The engine is about to overwrite pages, and will submit this command."""
        if isinstance(command, Revoke | Withdraw | Drop):
            self._shut(command.request)
            self._announced.append(command)

    def submitted(self, command: Command) -> None:
        """The engine submits this command."""
        if command in self._announced:
            self._announced.remove(command)
        elif isinstance(command, Revoke | Withdraw | Drop):
            self._shut(command.request)


class Agent:
    """Starts its thread when made. All methods are for the engine's thread.

    Args:
        config: settings.
        engine_id: the engine's name, told to peers.
        facts: which model this is; compared by `kv.model.model_problem`.
        cache: the rank's pages; only the agent's thread touches them, never a peer.
        produces: serve consumers.
        consumes: fetch from producers.
        shards: what the ranks of this engine hold, this one included; just this one by default.
        tells: kinds of final token (`protocol.wire.last_words`) that come with final offers.
        needs: kinds of final token that this engine cannot go on without. A load is not over before they have come.
        late_revokes: the engine may overwrite pages before it says that it takes them back
            (`take_back` or `submit`), but not before the step (`engine_steps`) that precedes.
        audits: the engine can compute a prompt whose KV is then compared (`Load.compares`). KV of
            a producer is loaded only once that has passed, since the producer started.
        store: where chunks of KV outlive their request; None without a pool.
        experts: the model sends tokens to experts, see `protocol.consuming.experts`.
        engine: name and version of the engine, told in records of the pool.
        wrap: what to make of each transport, for tests.

    Raises:
        PDConnectorError: the host cannot be listened on, a transport cannot be set up, or a
            page does not fit in a slot.
    """

    def __init__(
        self,
        config: Config,
        engine_id: str,
        facts: ModelFacts,
        cache: PagedCache,
        *,
        produces: bool,
        consumes: bool,
        shards: Sequence[Shard] = (),
        tells: Sequence[str] = (),
        needs: Sequence[str] = (),
        late_revokes: bool = False,
        audits: bool = False,
        experts: bool = False,
        store: Store | None = None,
        engine: str = "",
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> None:
        if cache.largest_page_bytes > config.slot_bytes:
            raise ConfigError(
                f"slot_mib {config.slot_mib}: one page of one layer has "
                f"{cache.largest_page_bytes} bytes and must fit in a slot (config key slot_mib)"
            )
        choice = choose(config, this_machine())
        config = with_names(config, choice.names)
        self.telemetry = Telemetry()
        self._cache = cache
        self._gate = PageGate()
        self._pending_outcomes = PendingOutcomes()
        self._commands = CommandQueue()
        self._facts = facts
        self._steps = EngineSteps(late_revokes=late_revokes)
        self._taken_back = TakenBack(self._shut_gate)
        self._ranks: tuple[Peer, ...] = ()
        book = AuditBook(experts=experts) if audits else None  # outlives the thread
        trust = WriterTrust(engine_id, audits=audits)  # as well

        def make_loop(port: int) -> Loop:
            return Loop(
                config,
                RankIdentity(
                    engine_id, secrets.randbits(63), self._facts, tuple(tells), tuple(needs)
                ),
                cache,
                self._commands,
                self._gate,
                self.telemetry,
                self._pending_outcomes.report,
                self._steps,
                lambda: self._ranks,
                produces=produces,
                consumes=consumes,
                shards=shards,
                audits=book,
                port=port,
                wrap=wrap,
                choice=choice,
                store=store,
                trust=trust,
                engine=engine,
            )

        try:
            self._thread = AgentThread(
                config,
                self.telemetry,
                self._commands,
                self._gate,
                self._pending_outcomes,
                make_loop,
                cache.enter_thread,
            )
        except BaseException:
            self._commands.close()
            raise
        self.host = self._loop.host
        """Numeric address that consumers dial: they look up no name."""
        self.port = self._loop.port
        """Control port that consumers dial; 0 for a rank that does not produce."""
        self.data_port = self._loop.data_port
        """TCP port that consumers dial for data; 0 if there is none."""
        if self.port and len(shards) < 2:
            self.introduce([Peer(Source(config.host, self.port, engine_id), cache.geometry.shard)])
        told = (self._loop.choice.describe(), self._loop.buffers.slot_memory)
        self.transports = "; ".join(filter(None, told))
        """The transports that are offered, where slots lie, and why nothing faster, for the log."""
        self._thread.start()
        close_at_exit(self._thread)

    def submit(self, command: Command, fence: Any = None) -> None:
        """Hand a command to the agent's thread.

        After `Revoke`, `Withdraw` and `Drop` have returned, this process neither reads nor writes the
        request's pages any more. A peer that still reads leased pages finds other bytes, and its
        load fails.

        Args:
            fence: an event on the cache's device (`torch.cuda.Event`). The work before it is done
                before pages of an `Offer` or `Computed` are read, or pages of a `Load` are
                written. By default what the calling thread has queued so far on its own stream.
        """
        self._taken_back.submitted(command)
        if isinstance(command, Revoke) and self._steps.late_revokes:
            command = command._replace(doubtful_since=self._steps.count - 1)
        if fence is None and isinstance(command, Offer | Computed | Load | Save | Fill):
            fence = self._cache.fence()
        with self._thread.submitting:
            if isinstance(command, ChangeModel):
                self._facts = command.facts  # also of an agent that is started again
            if isinstance(command, KnowWeights):
                self._facts = msgspec.structs.replace(self._facts, weights_full=command.full)
            self._pending_outcomes.expect(command)
            self._commands.put(command, fence)

    def introduce(self, ranks: Sequence[Peer]) -> None:
        """Name all ranks of the engine, this one included. A peer that asks any of them is told. The only
        rank of an engine need not be introduced."""
        self._ranks = tuple(ranks)

    def take_back(self, commands: Iterable[Command]) -> None:
        """The engine is about to overwrite the pages that these commands take back; it submits the
        commands later, with the others of its step. Once this has returned, the pages are no
        longer read."""
        for command in commands:
            self._taken_back.announced(command)

    def engine_steps(self) -> None:
        """The engine begins a step. If it makes none for too long, consumers do not wait for its
        prefills any more."""
        self._steps.begin()

    def outcomes(self) -> list[Outcome]:
        """Ends of loads, leases and watched holds since the last call, each reported once.

        If the agent's thread has died, what it owed ends with cause `internal`; if it hangs, with
        cause `agent_hung`. A load into whose pages it is copying while it hangs is still owed:
        those pages cannot be given to another request.
        """
        self._thread.abandon_if_hung()
        return self._pending_outcomes.drain()

    @property
    def pool_model(self) -> bytes:
        """The loaded model as the pool knows it; empty without a pool, or while that is not known. It is what was submitted
        last: saves and loads that are submitted later are of this model."""
        return (model_root(self._facts) or b"") if self._loop.pool_side else b""

    @property
    def pool_draft(self) -> str:
        """The draft model in names of this engine's parts in the pool; empty without one."""
        return draft_mark(self._facts.draft)

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Wait until there is an outcome, if transfers or loads from the pool are under way; at most `timeout_s` seconds.

        Returns:
            Whether it returned early: there is an outcome, or nothing is under way.
        """
        gauges = self.telemetry.gauges()
        under_way = self._pending_outcomes.loads or any(gauges.get(name) for name in UNDER_WAY)
        return not under_way or self._pending_outcomes.wait(timeout_s)

    def rest(self) -> None:
        """The engine is about to give up the memory of its pages. Once this has returned they are not touched, and no
        transport has a registration of them; what was under way has ended with cause `asleep`, and peers are told.
        Until `wake`, what is submitted waits. Harmless to repeat.

        Raises:
            PDConnectorError: the agent does not answer; it may use the pages.
        """
        self._thread.rest()

    def wake(self) -> None:
        """The pages have memory again, at the same addresses. Their content of before is gone. Harmless to repeat."""
        self._thread.wake()

    def close(self) -> None:
        """Stop the thread and free sockets, memory and descriptors. Harmless to repeat."""
        self._thread.close()

    @property
    def _loop(self) -> Loop:
        """The loop that runs now: another one after a restart."""
        return self._thread.loop

    def _shut_gate(self, request: str) -> None:
        if not self._gate.shut(request, max(0.0, self._thread.left_s())):
            self._thread.abandon()
