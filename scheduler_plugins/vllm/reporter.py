# SPDX-License-Identifier: Apache-2.0
"""Posts the engine's load for the API servers, and notes the predicted TTFT of every request."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler_plugins.admission.board import BoardWriter
from scheduler_plugins.admission.ledger import Ledger
from scheduler_plugins.admission.load import Decoding, LoadReport
from scheduler_plugins.admission.predict import Predictor
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.vllm.steps import StepTimer

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("scheduler_plugins.vllm")


class Reporter:
    """Reads the queue, the steps and the running requests, and changes none of them."""

    def __init__(self, vllm_config: Any, queue: WaitingQueue, steps: StepTimer) -> None:
        """If the board cannot be written, the engine still runs, and admission admits everything."""
        self.ledger = Ledger()
        self._queue = queue
        self._steps = steps
        self._predictor = Predictor(classes={}, by_cost=False)
        self._board: BoardWriter | None = None
        try:
            rank = vllm_config.parallel_config.data_parallel_index
            self._board = BoardWriter(vllm_config.instance_id, rank)
        except OSError as error:
            logger.warning("admission will not see the load of this engine: %s", error)
        atexit.register(self.close)

    def use(self, classes: Sequence[QosClass]) -> None:
        """Use these classes and this policy from now on."""
        by_name = {qos_class.name: qos_class for qos_class in classes}
        self._predictor = Predictor(classes=by_name, by_cost=self._queue.policy.by_cost)

    def arrived(self, request: Waiting, running: Sequence[Request]) -> None:
        """Note the predicted time to first token of a new request that is not in the queue yet."""
        now_s = time.time()
        qos = self._queue.fair_share.class_of(request.qos)
        ready = self._queue.estimator.known_tokens(request)
        report = self._report(running, now_s)
        expected = self._predictor.predict(report, qos, request.tokens, ready)
        waited_s = max(0.0, now_s - request.arrival_s)
        self.ledger.arrived(request.id, qos, request.arrival_s, waited_s + expected.ttft_s)

    def publish(self, running: Sequence[Request], now_s: float, *, idle: bool) -> None:
        """Post the load if a post is due. `now_s` is `time.monotonic()`."""
        if self._board is None or not self._board.due(now_s, idle=idle):
            return
        wall_s = time.time()
        try:
            self._board.write(
                self._report(running, wall_s, decoding=True),
                now_s,
                idle=idle,
                step_s=self._steps.under_way_s,
                classes=self.ledger.classes,
            )
        except OSError as error:
            logger.warning("admission will not see the load of this engine any more: %s", error)
            self.close()

    def close(self) -> None:
        """Take the post down. May be called twice."""
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def _report(
        self, running: Sequence[Request], now_s: float, *, decoding: bool = False
    ) -> LoadReport:
        model = self._steps.fit.model
        left_s = self._steps.prefilling_s
        sequences = []
        for request in running:
            if request.is_prefill_chunk:
                left_s += model.prefill_s(request.num_tokens, request.num_computed_tokens)
            elif decoding and request.max_tokens > 1:
                age_s = self.ledger.age_s(request.request_id, now_s)
                sequences.append(Decoding(age_s, request.num_tokens))
        return LoadReport.of(
            self._queue,
            model,
            now_s,
            prefill_left_s=left_s,
            decoding=sequences,
            decode_tokens=self.ledger.generated,
            running=len(running),
        )
