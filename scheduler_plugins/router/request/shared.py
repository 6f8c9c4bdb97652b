# SPDX-License-Identifier: Apache-2.0
"""What all requests of one process share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from scheduler_plugins.admission.prompt import PromptMemory
from scheduler_plugins.router.engines.circuit import RetryBudget
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine_set import Pool
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Policy, Request
from scheduler_plugins.router.routing.front import FrontQueue
from scheduler_plugins.router.routing.promises import Margins
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.tokens.prompt_tokens import PromptTokens
from scheduler_plugins.router.tracing import Tracing


@dataclass(eq=False)
class Shared:
    """What all requests of one router share."""

    config: RouterConfig
    """The settings for requests that come from now on."""
    pool: Pool
    connections: EngineConnections
    """For clients' requests to engines."""
    metrics: Metrics
    policy: Policy
    tokens: PromptTokens
    """The tokens of prompts."""
    tracing: Tracing
    """Spans of requests."""
    lengths: PromptMemory = field(default_factory=lambda: PromptMemory(0))
    """How many tokens a text has."""
    retries: RetryBudget = field(default_factory=RetryBudget)
    front: FrontQueue = field(default_factory=FrontQueue)
    """Where requests wait while engines have enough to do."""
    margins: Margins = field(default_factory=Margins)
    """What the predictions of times to the first token are multiplied with."""
    random: Random = field(default_factory=Random)

    def came(self, request: Request, expected_s: float, arrived: float) -> None:
        """A stream's first token came.

        Args:
            expected_s: what was predicted from `arrived` on, which is by the event loop's clock.
        """
        real_s = asyncio.get_running_loop().time() - arrived
        self.metrics.expected_first_token_s.observe(expected_s)
        self.margins.learn(request, expected_s, real_s)
        margin = self.metrics.promise_margin.labels(request.qos)
        margin.set(self.margins.of(request.qos))
