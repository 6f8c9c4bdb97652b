# SPDX-License-Identifier: Apache-2.0
"""When the last chunk of a load with states lands in a decode engine, and when its next step begins. Loaded into vLLM's
worker by `--worker-extension-cls`; one rank, whose agent is in the same process."""

from __future__ import annotations

import time
from typing import Any

ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""With it vLLM serves `/collective_rpc`."""
ARGS = ("--worker-extension-cls", f"{__name__}.StepProbe")

_delays_s: list[float] = []


class StepProbe:
    """Methods that `/collective_rpc` calls."""

    model_runner: Any  # vLLM's

    def watch_steps(self) -> None:
        """From now on delays are noted."""
        from pd_connector.agent.consuming.receive_pipeline import ChunkReceiver, ReceivePipeline

        receivers: Any = ChunkReceiver
        pipelines: Any = ReceivePipeline
        landed, place = receivers.landed, pipelines.place_states
        execute = self.model_runner.execute_model
        landed_s = placed_s = 0.0

        def note_landing(receiver: Any, *args: Any) -> None:
            nonlocal landed_s
            landed_s = time.perf_counter()
            landed(receiver, *args)

        def note_states(pipeline: Any, request: str) -> None:
            nonlocal placed_s
            place(pipeline, request)
            placed_s = landed_s

        def note_step(scheduled: Any, *args: Any, **named: Any) -> Any:
            nonlocal placed_s
            if placed_s and scheduled.total_num_scheduled_tokens:
                _delays_s.append(time.perf_counter() - placed_s)
                placed_s = 0.0
            return execute(scheduled, *args, **named)

        receivers.landed, pipelines.place_states = note_landing, note_states
        self.model_runner.execute_model = note_step

    def step_delays(self) -> list[float]:
        """Seconds from the landing of a load's last chunk to the next step, for each load so far."""
        return _delays_s
