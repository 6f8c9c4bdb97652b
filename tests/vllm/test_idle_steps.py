# SPDX-License-Identifier: Apache-2.0
"""A worker pauses in steps that compute nothing, so that its agent can move KV, unless others wait for it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import SteppedEngine

from pd_connector.config import Config
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.worker_side import WorkerSide


class Agent:
    """Has no outcomes, and notes how long it may be waited for."""

    pool_model = b""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.telemetry = Telemetry()

    def engine_steps(self) -> None:
        pass

    def outcomes(self) -> list[object]:
        return []

    def wait_for_outcome(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return False


def pauses(ranks: int, *, experts: bool) -> int:
    """How often a worker pauses in three such steps.

    Args:
        ranks: data-parallel ranks of its engine.
        experts: the model is a mixture of experts.
    """
    agent = Agent()
    worker = worker_of(agent, ranks, experts=experts)
    for _ in range(3):
        worker.begin(StepCommands(idle=True))
        worker.outcomes()
    return len(agent.waits)


def worker_of(agent: Agent, ranks: int = 1, *, experts: bool = False) -> WorkerSide:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_size=ranks),
        model_config=SimpleNamespace(is_moe=experts),
    )
    cache = SimpleNamespace(kv_cache_groups=())
    worker = WorkerSide(vllm_config, cache, Config())  # type: ignore[arg-type]
    worker._next_compare = float("inf")
    worker._agent = agent  # type: ignore[assignment]
    return worker


@pytest.mark.parametrize(
    ("ranks", "experts", "wanted"), [(2, True, 0), (2, False, 3), (1, True, 3)]
)
def test_ranks_that_compute_each_step_together_do_not_wait_for_one_that_waits(
    ranks: int, experts: bool, wanted: int
) -> None:
    """A rank without work joins the others' step right after its own."""
    assert pauses(ranks, experts=experts) == wanted


def test_an_engine_steps_on_until_its_gauges_have_told_that_it_rests() -> None:
    """The agent reports the end of a transfer before it has put its gauges right: a step that hears of the first may
    not see the second. It was the last step before the next request."""
    agent, scheduler = Agent(), SteppedEngine().side
    worker = worker_of(agent)
    agent.telemetry.gauge(outgoing_transfers=1.0, leased_pages=4.0)

    def told() -> object:
        worker.outcomes()
        scheduler.workers_reported(worker.activity())
        stats = scheduler.stats()
        return stats and stats.data["gauges"]

    assert told() == {"outgoing_transfers": 1.0, "leased_pages": 4.0}
    assert scheduler.pending_work, "though no request is there"
    agent.outcomes = lambda: agent.telemetry.gauge(outgoing_transfers=0.0, leased_pages=0.0) or []  # type: ignore[method-assign]
    assert told() is None
    assert scheduler.pending_work
    assert told() == {"outgoing_transfers": 0.0, "leased_pages": 0.0}
    assert not scheduler.pending_work
