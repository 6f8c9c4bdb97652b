# SPDX-License-Identifier: Apache-2.0
"""The wait of one request in the front queue."""

from scheduler_plugins.router.policies.base import Reject, Request
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import RejectedError
from scheduler_plugins.router.routing.front import QueueFullError, turn_of


async def wait_for_turn(shared: Shared, request: Request) -> None:
    """Wait in the front queue while all prefill engines are busy, or no decode engine has room.

    Raises:
        QueueFullError: the queue of the class is full. RejectedError: the wait would break the
            class's promise.
    """
    config, metrics = shared.config, shared.metrics
    turn = turn_of(request, shared.pool)
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
