# SPDX-License-Identifier: Apache-2.0
"""Answers with `finish_reason` `abort`: tells a wanted abort from an engine that is being stopped.

| engine | why it aborts | its answer then |
|---|---|---|
| vLLM | SIGTERM (without `--shutdown-timeout`), or a fault that it may recover from | `/is_paused`: 500, nothing, or
no connection, because its core takes no more commands |
| vLLM | `/pause`, `/abort_requests`, `/sleep` (`VLLM_SERVER_DEV_MODE=1`) | `/is_paused`: 200 |
| SGLang | `/abort_request`, `/pause_generation` | it drains at SIGTERM, and answers faults with an error |

In vLLM 0.32, `EngineCoreProc._handle_shutdown` first changes the state and then sends the aborts. After the change,
`_reject_utility_in_shutdown` rejects commands. So an answer 200 after an abort proves that it was not a shutdown.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import (
    EngineCall,
    ResponseTimeouts,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.request.shared import Shared

PAUSED = "/is_paused"
PAUSED_S = 1.0
"""Longest wait for an answer. The client's stream pauses meanwhile."""


async def is_wanted_abort(
    engine: BackendEngine, shared: Shared, headers: Mapping[str, str]
) -> bool:
    """Whether a client asked for the abort that has just ended an answer. False if that is unknown: then another
    engine answers, and nothing is lost.

    Args:
        headers: the client's headers, as engines get them.
    """
    if engine.kind is Kind.SGLANG:
        return True
    call, timeouts = EngineCall("GET", PAUSED, headers), ResponseTimeouts(PAUSED_S, PAUSED_S)
    try:
        async with exchange(shared.connections, engine, call, timeouts, shared.config) as answer:
            await raise_for_status(answer, only=200)
            await answer.read_all()
    except EngineFailedError:
        return False
    return True
