# SPDX-License-Identifier: Apache-2.0
"""Steps that compute nothing: a worker pauses in them, so that its agent can move KV, unless others wait for it. A
paused engine makes none for requests that wait in its queue."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import OFFER, SteppedEngine
from vllm.v1.core.sched.interface import PauseState

from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.telemetry import Telemetry
from pd_connector.vllm.messages import StepCommands, WorkerActivity
from pd_connector.vllm.worker_side import WorkerSide


class Agent:
    """Has no outcomes, and notes how long it may be waited for."""

    pool_model = b""
    pool_draft = ""
    facts = None

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


PAUSED = [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]


def telling(**gauges: float) -> WorkerActivity:
    return WorkerActivity(gauges={0: gauges})


@pytest.mark.parametrize("state", PAUSED)
def test_a_pause_does_not_wait_for_transfers_of_requests_that_stay_in_the_queue(
    state: PauseState,
) -> None:
    engine = SteppedEngine()
    engine.scheduler.set_pause_state(state)
    engine.fetch("fetched", 100, wait=True)
    engine.add("offered", 100, seed=1, **OFFER)
    assert engine.scheduler.has_requests(), "the agents have to hear of them"
    engine.step(telling(incoming_transfers=1.0, outgoing_transfers=1.0))
    assert not engine.scheduler.has_requests()
    engine.abort("fetched")
    assert engine.scheduler.has_requests(), "and of their end"


def test_a_pause_that_keeps_requests_does_not_wait_for_their_loads() -> None:
    engine = SteppedEngine(audit="off")
    engine.fetch("loading", 100)
    engine.step(telling(incoming_transfers=1.0, landing_slots=2.0))
    assert engine.scheduler.kv_holding_waiting
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()


@pytest.mark.parametrize("state", PAUSED)
def test_a_paused_engine_steps_until_its_gauges_have_told_that_leases_have_ended(
    state: PauseState,
) -> None:
    engine = SteppedEngine()
    engine.side.set_peers((Peer(Source("127.0.0.1", 7, "e"), Shard(0, 2, 0, 1)),))
    engine.add("leased", 48, 1, **OFFER)
    engine.step()
    engine.scheduler.set_pause_state(state)
    engine.add("queued", 48, seed=1, **OFFER)
    held = telling(leased_pages=3.0, outgoing_transfers=2.0)
    engine.step(held)
    assert engine.scheduler.has_requests()
    engine.step(held, finished_sending={"leased"})
    assert list(engine.scheduler.requests) == ["queued"]
    assert engine.scheduler.has_requests(), "gauges come one step later"
    engine.step(telling(leased_pages=0.0, outgoing_transfers=1.0))
    assert not engine.scheduler.has_requests()
