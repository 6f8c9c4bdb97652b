# SPDX-License-Identifier: Apache-2.0
"""The objects that all parts of one rank's agent share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_connector.agent.engine_steps import EngineSteps
from pd_connector.agent.handshake import RankIdentity
from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Context
from pd_connector.memory.buffers import Buffers
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.audit import AuditBook
from pd_connector.protocol.wire.peers import Peer
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport
from pd_connector.transport.choice import Choice


@dataclass(frozen=True, slots=True)
class RankResources:
    """One rank's shared objects, used by its agent's thread only.

    Args:
        context: the ZeroMQ context of all sockets.
        keys: keys of the sessions; None if they are not encrypted.
        transports: the preferred ones first.
        wake: makes the agent's thread take another turn; for any thread.
        steps: the engine's steps.
        ranks: returns all ranks of this engine that it has introduced.
        choice: how the transports were chosen.
        buffers: the slots that chunks pass through.
        audits: results of audits; None if producers need not pass one.
    """

    config: Config
    identity: RankIdentity
    context: Context
    keys: CurveKeys | None
    cache: PagedCache
    transports: Sequence[Transport]
    telemetry: Telemetry
    wake: Callable[[], None]
    steps: EngineSteps
    ranks: Callable[[], Sequence[Peer]]
    choice: Choice
    buffers: Buffers
    audits: AuditBook | None = None
