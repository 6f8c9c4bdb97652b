# SPDX-License-Identifier: Apache-2.0
"""The interface between an engine and a rank's agent: the engine submits commands and takes outcomes.

One thread does the work: `pd-agent` (`agent_thread`), which runs a `Loop`.
"""

import atexit
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

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
from pd_connector.kv.model import ModelFacts, knowing
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
    """An object that can be closed more than once."""

    def close(self) -> None: ...


_open: "weakref.WeakKeyDictionary[Closable, int]" = weakref.WeakKeyDictionary()
"""Objects to close, with the id of the process that made them. A forked process does not have their threads."""


def close_at_exit(made: Closable) -> None:
    """Close this object when the interpreter exits: a thread that still runs library code then can crash it."""
    _open[made] = os.getpid()


@atexit.register
def _close_all() -> None:
    for made, process in list(_open.items()):
        if process == os.getpid():
            made.close()


class TakenBack:
    """Shuts a request's gate for each command that takes its pages back; the agent's thread opens it again. An engine can
    announce such a command before it submits it: the gate is shut once for both. Used by the engine's thread.

    Args:
        shut: shuts the gate of a request.
    """

    def __init__(self, shut: Callable[[str], None]) -> None:
        self._shut = shut
        self._announced: list[Command] = []

    def announced(self, command: Command) -> None:
        """Shut the gate early: the engine will overwrite the pages before it submits this command."""
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
        config: the operator's settings.
        engine_id: the engine's name among its peers.
        facts: the model; peers compare it by `kv.model.model_problem`.
        cache: the rank's pages. Only the agent's thread touches them, never a peer.
        produces: serve consumers.
        consumes: fetch from producers.
        shards: shards of all ranks of this engine, this one included; by default only this one.
        tells: the data that this engine sends with final offers besides KV (`protocol.wire.final_token`).
        needs: the data that this engine needs besides KV. A load ends only after this data has come.
        late_revokes: the engine can overwrite pages before it takes them back (`take_back` or `submit`), but not before
            the preceding step has begun (`engine_steps`).
        audits: the engine can compute prompts to compare their KV (`Load.compares`). KV of a producer is loaded only
            after such an audit has passed.
        store: keeps chunks of KV after their request; None without a pool.
        experts: the model is a mixture of experts, see `protocol.consuming.experts`.
        engine: name and version of the engine, for records of the pool.
        wrap: wraps each transport, for tests.

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
        notes = (self._loop.choice.describe(), self._loop.buffers.slot_memory)
        self.transports = "; ".join(filter(None, notes))
        """For the log: the transports, the memory of slots, and why neither is faster."""
        self._thread.start()
        close_at_exit(self._thread)

    def submit(self, command: Command, fence: Any = None) -> None:
        """Pass a command to the agent's thread.

        After `submit` of a `Revoke`, `Withdraw` or `Drop` has returned, this process does not touch the request's pages. A
        peer that still reads leased pages finds other bytes, and its load fails.

        Args:
            fence: an event on the cache's device (`torch.cuda.Event`). Pages of an `Offer` or `Computed` are read, and
                pages of a `Load` are written, only when the work before it is done. Default: the work that the calling
                thread has queued so far on its own stream.
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
                self._facts = knowing(self._facts, command.weights, command.draft)
            self._pending_outcomes.expect(command)
            self._commands.put(command, fence)

    def introduce(self, ranks: Sequence[Peer]) -> None:
        """Set the ranks of the engine, this one included. Peers can ask any rank for them. A single rank need not call
        this."""
        self._ranks = tuple(ranks)

    def take_back(self, commands: Iterable[Command]) -> None:
        """The engine will overwrite the pages that these commands take back, and submit the commands later. After the
        return the pages are not read."""
        for command in commands:
            self._taken_back.announced(command)

    def engine_steps(self) -> None:
        """The engine begins a step. If it makes none for too long, consumers stop to wait for its prefills."""
        self._steps.begin()

    def outcomes(self) -> list[Outcome]:
        """Ends of loads, leases and watched holds since the last call, each reported once.

        If the agent's thread has died, all pending outcomes fail with cause `internal`; if it hangs, with `agent_hung`. One
        outcome stays pending: that of a load whose pages a hung thread is writing. No other request can have these pages.
        """
        self._thread.abandon_if_hung()
        return self._pending_outcomes.drain()

    @property
    def facts(self) -> ModelFacts:
        """What peers are told of the model, as it was submitted last."""
        return self._facts

    @property
    def pool_model(self) -> bytes:
        """The loaded model's key in the pool; empty without a pool, or while the model is not known. Saves and loads that
        are submitted from now on are of this model."""
        return (model_root(self._facts) or b"") if self._loop.pool_side else b""

    @property
    def pool_draft(self) -> str:
        """The draft model's mark in names of this engine's parts in the pool; empty without a draft model."""
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
        """The engine will give up the memory of its pages. After the return they are not touched, and no transport has them
        registered. Transfers that were under way have failed with cause `asleep`, also at the peers. Commands wait until
        `wake`. It can be repeated.

        Raises:
            PDConnectorError: the agent does not answer, and may still use the pages.
        """
        self._thread.rest()

    def wake(self) -> None:
        """The pages have memory again, at the same addresses, without their old content. It can be repeated."""
        self._thread.wake()

    def close(self) -> None:
        """Stop the thread and free sockets, memory and descriptors. It can be repeated."""
        self._thread.close()

    @property
    def _loop(self) -> Loop:
        """The loop that runs now; a restart makes another one."""
        return self._thread.loop

    def _shut_gate(self, request: str) -> None:
        if not self._gate.shut(request, max(0.0, self._thread.left_s())):
            self._thread.abandon()
