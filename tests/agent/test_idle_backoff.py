# SPDX-License-Identifier: Apache-2.0
"""How long a worker with nothing to compute leaves the processor to its agent."""

from pd_connector.agent.idle_backoff import FIRST_S, LONGEST_S, IdleBackoff


class Agent:
    """Notes how long each wait might take."""

    def __init__(self) -> None:
        self.has_outcome = False
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.has_outcome


def pauses(backoff: IdleBackoff, agent: Agent, times: int) -> list[float]:
    agent.waits.clear()
    for _ in range(times):
        backoff.pause(agent.wait)
    return agent.waits


def test_a_pause_is_never_longer_than_the_idle_time_before_it_and_the_first():
    given = pauses(IdleBackoff(alone=True), Agent(), 10)
    assert given[0] == FIRST_S
    assert all(pause <= FIRST_S + sum(given[:n]) for n, pause in enumerate(given))
    assert max(given) == given[-1] == LONGEST_S


def test_an_outcome_and_new_work_make_the_next_pause_a_short_one():
    backoff, agent = IdleBackoff(alone=True), Agent()
    pauses(backoff, agent, 5)
    agent.has_outcome = True
    assert pauses(backoff, agent, 2) == [LONGEST_S, FIRST_S]
    agent.has_outcome = False
    pauses(backoff, agent, 5)
    backoff.reset()
    assert pauses(backoff, agent, 1) == [FIRST_S]


def test_with_several_ranks_pauses_do_not_grow():
    assert set(pauses(IdleBackoff(alone=False), Agent(), 5)) == {FIRST_S}
