# SPDX-License-Identifier: Apache-2.0
"""Messages between the keeper and a worker, over a real socket pair."""

from __future__ import annotations

import socket

from router_fakes import run

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.workers.link import link_to_keeper, link_to_worker
from scheduler_plugins.router.workers.messages import Learnt, Listening


def test_messages_that_can_wait_come_together_and_in_order() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        keeper, worker = await link_to_worker(ours), await link_to_keeper(theirs)
        sent = [Learnt(1, StepLoad(n, n * n, 0, 0), 0.5) for n in range(200)]
        for one in sent[:100]:
            worker.send_soon(one)
        worker.send(Listening(7))
        assert await keeper.receive() == Listening(7), "it need not wait for them"
        for one in sent[100:]:
            worker.send_soon(one)
        assert [await keeper.receive() for _ in sent] == sent
        worker.close()
        keeper.close()

    run(scenario())


def test_what_waits_for_somebody_who_has_ended_is_lost_without_an_error() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        keeper, worker = await link_to_worker(ours), await link_to_keeper(theirs)
        worker.send_soon(Learnt(1, StepLoad(1, 1, 0, 0), 0.5))
        worker.close()
        worker._send_later()
        keeper.close()

    run(scenario())
