# SPDX-License-Identifier: Apache-2.0
"""The objects that all requests of one process share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from scheduler_plugins.admission.prompt import PromptMemory
from scheduler_plugins.router.engines.circuit import RetryBudget
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.routing.fallback import Fallback
from scheduler_plugins.router.routing.front import FrontQueue
from scheduler_plugins.router.routing.promises import Margins
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.tokens.prompt_tokens import PromptTokens
from scheduler_plugins.router.tracing import Tracing


@dataclass(eq=False)
class Shared:
    """The objects that all requests of one process share."""

    config: RouterConfig
    """The current settings, used by new requests."""
    pool: EnginePool
    connections: EngineConnections
    """Connections that carry clients' requests to engines."""
    metrics: Metrics
    policy: Fallback
    tokens: PromptTokens
    """Turns prompts into tokens."""
    tracing: Tracing
    """Spans of requests."""
    lengths: PromptMemory = field(default_factory=lambda: PromptMemory(0))
    """Remembered lengths of texts, in tokens."""
    retries: RetryBudget = field(default_factory=RetryBudget)
    front: FrontQueue = field(default_factory=FrontQueue)
    """The queue for requests while engines are busy."""
    margins: Margins = field(default_factory=Margins)
    """Factors for predicted times to the first token."""
    random: Random = field(default_factory=Random)

    def waiting(self) -> Mapping[str, Front]:
        """What waits in the front queue, by group of engines."""
        return self.front.by_group(asyncio.get_running_loop().time())

    def came(self, request: Request, expected_s: float, arrived: float) -> None:
        """A stream's first token came.

        Args:
            expected_s: predicted time from `arrived` to the first token.
        """
        real_s = asyncio.get_running_loop().time() - arrived
        self.metrics.expected_first_token_s.observe(expected_s)
        self.margins.learn(request, expected_s, real_s)
        margin = self.metrics.promise_margin.labels(request.qos)
        margin.set(self.margins.of(request.qos))
