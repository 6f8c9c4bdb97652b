# SPDX-License-Identifier: Apache-2.0
"""One request's wait at the front."""

from scheduler_plugins.router.policies.base import Reject, Request
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import RejectedError
from scheduler_plugins.router.routing.front import QueueFullError, turn_of


async def wait_for_turn(shared: Shared, request: Request) -> None:
    """Wait at the front while all prefill engines have enough to do, or no decode engine has room.

    Raises:
        QueueFullError, RejectedError: waiting makes no sense.
    """
    config, metrics = shared.config, shared.metrics
    turn = turn_of(request, shared.pool, config.engine_queue_s)
    late_s = shared.front.expected_s(turn, config.classes) - request.ttft_slo_s
    if late_s > 0:
        metrics.rejected.labels(request.qos, "ttft").inc()
        raise RejectedError(Reject("ttft", late_s))
    try:
        with metrics.waiting.labels(request.qos).track_inprogress():
            await shared.front.wait(turn, config)
    except QueueFullError:
        metrics.rejected.labels(request.qos, "queue_full").inc()
        raise
