# SPDX-License-Identifier: Apache-2.0
"""How long a worker with nothing to compute leaves the processor to its agent."""

from pd_connector.agent.rests import FIRST_S, LONGEST_S, Rests


class Agent:
    """Notes how long it was given."""

    def __init__(self) -> None:
        self.news = False
        self.given: list[float] = []

    def rest(self, timeout_s: float) -> bool:
        self.given.append(timeout_s)
        return self.news


def taken(rests: Rests, agent: Agent, times: int) -> list[float]:
    agent.given.clear()
    for _ in range(times):
        rests.take(agent.rest)
    return agent.given


def test_a_rest_is_never_longer_than_what_went_before_it_and_the_first():
    given = taken(Rests(alone=True), Agent(), 10)
    assert given[0] == FIRST_S
    assert all(rest <= FIRST_S + sum(given[:n]) for n, rest in enumerate(given))
    assert max(given) == given[-1] == LONGEST_S


def test_news_and_new_work_make_the_next_rest_a_short_one():
    rests, agent = Rests(alone=True), Agent()
    taken(rests, agent, 5)
    agent.news = True
    assert taken(rests, agent, 2) == [LONGEST_S, FIRST_S]
    agent.news = False
    taken(rests, agent, 5)
    rests.stirred()
    assert taken(rests, agent, 1) == [FIRST_S]


def test_where_other_ranks_wait_for_it_rests_do_not_grow():
    assert set(taken(Rests(alone=False), Agent(), 5)) == {FIRST_S}
