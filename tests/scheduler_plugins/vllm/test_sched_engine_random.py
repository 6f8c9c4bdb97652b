# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in whatever order: each request is served once, with the right answer, in time.

The worker of the rig sees a block that is freed too early or given out twice, so these tests also
hold for what suffix discarding does to vLLM's free queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_rig import BLOCK, Rig, words
from vllm.v1.core.sched.scheduler import Scheduler

CLASSES = """
scheduler:
  policy: {policy}
  max_overtaken: {bound}
  qos_classes:
    - {{name: premium, reserved_fraction: 0.3, priority: 9}}
    - {{name: free, reserved_fraction: 0.7, priority: 1}}
"""
POLICIES = ("srjf_calibrated", "prefill_only", "fcfs", "length_grouped", "longest_prefix")


class Arrival(NamedTuple):
    step: int
    family: int  # requests of one family share a prefix
    shared: int
    own: int
    max_tokens: int
    qos: str | None
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    family=st.integers(0, 2),
    shared=st.integers(1, 90),
    own=st.integers(0, 40),
    max_tokens=st.sampled_from([1, 1, 1, 2, 7]),
    qos=st.sampled_from(["premium", "free", "unheard of", None]),
    abort_after=st.sampled_from([None, None, None, None, 0, 1, 3]),
)


def play(
    rig: Rig,
    plan: list[Arrival],
    resets: Collection[int] = (),
    failures: Collection[int] = (),
) -> None:
    """Let everything arrive when it is due, and run until nothing is left.

    Args:
        resets: steps before which the prefix cache is reset and all that runs is preempted.
        failures: steps in which no blocks can be had.
    """
    manager = rig.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    for step in range(14):
        manager.allocate_slots = _nothing if step in failures else allocate
        for n, one in enumerate(plan):
            if one.step == step:
                prompt = words(one.family, one.shared) + words(1000 + n, one.own)
                rig.add(f"r{n}", prompt, one.max_tokens, qos=one.qos)
            if one.abort_after is not None and one.step + one.abort_after == step:
                rig.abort(f"r{n}")
        if step in resets:
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rig.scheduler.has_requests():
            rig.step()
    manager.allocate_slots = allocate
    rig.run()
    rig.assert_served()


def _nothing(*args: object, **more: object) -> None:
    """Stands for `allocate_slots` where there is no room."""


def overtakes(rig: Rig, plan: list[Arrival]) -> int:
    """The largest number of later requests of its class that started before a request."""
    came = {f"r{n}": (one.step, n, one.qos == "premium") for n, one in enumerate(plan)}
    started = dict.fromkeys(name for step in rig.worker.steps for name in step)
    order = [name for name in started if name in came]
    most = 0
    for place, name in enumerate(order):
        step, n, premium = came[name]
        before = [came[other] for other in order[:place]]
        most = max(most, sum(one[2] is premium and one[:2] > (step, n) for one in before))
    return most


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, str]]:
    """Additional config with a policy and a bound."""
    folder = tmp_path_factory.mktemp("settings")

    def write(policy: str, bound: int) -> dict[str, str]:
        path = folder / f"{policy}-{bound}.yaml"
        path.write_text(CLASSES.format(policy=policy, bound=bound))
        return {"pd_scheduler": str(path)}

    return write


@settings(max_examples=150)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=14),
    policy=st.sampled_from(POLICIES),
    blocks=st.sampled_from([11, 14, 20, 60]),  # 10 blocks hold one request and nothing beside it
    depth=st.sampled_from([1, 2]),
    bound=st.sampled_from([0, 3, 256]),
    resets=st.sets(st.integers(1, 12), max_size=2),
    failures=st.sets(st.integers(1, 12), max_size=4),
)
def test_nothing_is_lost_served_twice_answered_wrong_or_overtaken_too_often(
    settings_of,
    plan: list[Arrival],
    policy: str,
    blocks: int,
    depth: int,
    bound: int,
    resets: set[int],
    failures: set[int],
) -> None:
    rig = Rig(
        blocks=blocks,
        budget=48,
        seqs=4,
        max_model_len=(blocks - 1) * BLOCK,
        depth=depth,
        additional=settings_of(policy, bound),
    )
    play(rig, plan, resets, failures)
    assert overtakes(rig, plan) <= bound


def test_without_the_bound_one_is_overtaken_by_all_that_are_shorter(settings_of) -> None:
    """The control: the same arrivals break a bound that is not set."""
    long = Arrival(0, 0, 90, 40, 1, None, None)
    plan = [long] + [Arrival(step, 1, 5, 5, 1, None, None) for step in range(1, 13)]
    for bound in (256, 3):
        rig = Rig(blocks=20, budget=130, seqs=1, additional=settings_of("srjf_calibrated", bound))
        rig.add("running", words(7, 130), 2)
        rig.step()
        play(rig, plan)
        assert overtakes(rig, plan) == min(bound, 12)


def test_the_worker_sees_a_block_that_is_given_out_twice() -> None:
    """The control of all of these tests."""
    rig = Rig(Scheduler, blocks=20)
    rig.add("a", words(1, 40), 9)
    rig.step()
    pool = rig.scheduler.kv_cache_manager.block_pool
    (held,) = rig.scheduler.kv_cache_manager.get_blocks("a").blocks
    pool.free_blocks(held)
    pool.evict_blocks({block.block_id for block in held})
    rig.add("b", words(2, 60), 9)
    with pytest.raises(AssertionError, match="wrong KV"):
        rig.run()
