# SPDX-License-Identifier: Apache-2.0
"""The live page's table of pairs: each prefill engine beside each decode engine that gets KV from it."""

from __future__ import annotations

from router_fakes import World, run

from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.protocol.wire.peers import Peer, Source
from scheduler_plugins.router.endpoints.page import MOST_SHOWN, pairs
from scheduler_plugins.router.engines.traffic import FromProducer


def test_ranks_of_one_prefill_engine_are_one_row_and_the_busiest_pair_is_first() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=2) as world:
            prefill = world.known(world.p[0])
            peers = tuple(
                Peer(Source("10.0.0.1", 7100 + rank, "e"), Shard(0, 4, rank, 2)) for rank in (0, 1)
            )
            prefill.addresses = (ProducerAddress("e", peers),)
            got = FromProducer(10.0, 4.0, 3.0, 2.0, 1.0, {"int8": 10.0}, 5.0)
            slow, busy = (world.known(one) for one in world.d)
            for decode, producers in (
                (slow, {"10.0.0.1:7100": got, "10.0.0.9:7100": got._replace(bytes_s=1.0)}),
                (busy, {"10.0.0.1:7100": got, "10.0.0.1:7101": got}),
            ):
                decode.traffic = decode.traffic._replace(producers=producers)
            rows = pairs([prefill, slow, busy])
            assert [(row["prefill"], row["decode"]) for row in rows] == [
                (prefill.url, busy.url),
                (prefill.url, slow.url),
                ("10.0.0.9:7100", slow.url),
            ]
            assert rows[0] == {
                "prefill": prefill.url,
                "decode": busy.url,
                "bytes_s": 10,
                "codecs": {"int8": 20.0},
                "chunks": 8.0,
                "early_chunks": 6.0,
                "transfers": 4.0,
                "failed": 2.0,
            }
            many = {f"h:{n}": got for n in range(100)}
            slow.traffic = slow.traffic._replace(producers=many)
            assert len(pairs([slow])) == MOST_SHOWN

    run(scenario())
