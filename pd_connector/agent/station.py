# SPDX-License-Identifier: Apache-2.0
"""What both halves of an agent, and whoever opens their sessions, work with."""

from collections.abc import Sequence
from dataclasses import dataclass

from pd_connector.agent.handshake import Identity
from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Context
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Station:
    """One rank's, used by its agent's thread only.

    Args:
        context: of all sockets.
        keys: of sessions; None where they are not encrypted.
        transports: in the order in which they are preferred.
    """

    config: Config
    identity: Identity
    context: Context
    keys: CurveKeys | None
    cache: PagedCache
    transports: Sequence[Transport]
    telemetry: Telemetry
