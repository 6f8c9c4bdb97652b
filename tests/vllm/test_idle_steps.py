# SPDX-License-Identifier: Apache-2.0
"""A worker pauses in steps that compute nothing, so that its agent can move KV, unless others wait for it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from pd_connector.config import Config
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.worker_side import WorkerSide


class Agent:
    """Has no outcomes, and notes how long it may be waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

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
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_size=ranks),
        model_config=SimpleNamespace(is_moe=experts),
    )
    worker = WorkerSide(vllm_config, None, Config())  # type: ignore[arg-type]
    worker._next_compare = float("inf")
    worker._agent = agent = Agent()  # type: ignore[assignment]
    for _ in range(3):
        worker.begin(StepCommands(idle=True))
        worker.outcomes()
    return len(agent.waits)


@pytest.mark.parametrize(
    ("ranks", "experts", "wanted"), [(2, True, 0), (2, False, 3), (1, True, 3)]
)
def test_ranks_that_compute_each_step_together_do_not_wait_for_one_that_waits(
    ranks: int, experts: bool, wanted: int
) -> None:
    """A rank without work joins the others' step right after its own."""
    assert pauses(ranks, experts=experts) == wanted
