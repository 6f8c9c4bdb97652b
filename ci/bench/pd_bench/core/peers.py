# SPDX-License-Identifier: Apache-2.0
"""The cost of an agent with sessions with many producers, and with many waiting requests."""

import multiprocessing
import os
import secrets
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from pd_bench.report import BenchError
from pd_connector.agent.agent import Agent
from pd_connector.agent.commands import Hold
from pd_connector.config import Config
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.transport import ShmTransport

SESSIONS = 256
WAITING = 8000
REST_BUDGET_MS = 1.0
"""CPU milliseconds of the agent's thread per second while nothing happens."""
MESSAGE_BUDGET_MS = 0.2
_LEASE_S = 30.0
"""Settings of the producers, as by default."""
_REST_S = 48.0
"""Three rounds of heartbeats, which are 16 s apart. The window begins between two rounds (`_rests`). Otherwise it would
have three or four."""
_SETTLE_S = 18.0
"""Time until the sessions have settled: deadlines of handshakes have passed, and every heartbeat has been made once."""
_PATIENCE_S = 120.0
_SHARD = Shard(0, 1, 0, 1)
_GEOMETRY = Geometry(
    _SHARD,
    (
        Group(
            kind="attention",
            layers=(0,),
            heads=1,
            key_dim=8,
            value_dim=8,
            page_size=16,
            window=0,
            dtype="bfloat16",
            layout="bench",
            heads_apart=True,
        ),
    ),
)
_MODEL = ModelFacts(b"bench", b"bench")


class PeerCosts(NamedTuple):
    """CPU time of the agent's thread in milliseconds, without ZeroMQ's own thread."""

    rest_ms: float  # a second, with all sessions standing and all requests waiting
    message_ms: float  # one message, `Ready`, with its outcome for the engine


def measure(sessions: int = SESSIONS, waiting: int = WAITING, rest_s: float = _REST_S) -> PeerCosts:
    """Open `sessions` sessions, let `waiting` requests wait over them, and measure.

    Another process plays the producers, so the figures exclude their cost.

    Raises BenchError if sessions do not open or answers do not come.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_play_producers, args=(theirs, sessions), daemon=True
    )
    process.start()
    agent = _agent()
    try:
        ports = _answer(ours)
        _hold(agent, ports, waiting)
        _wait(lambda: _sessions(agent) == sessions, "sessions")
        ours.send("watched")
        _wait(lambda: _ask(ours, "watched") >= waiting, "requests watched")
        time.sleep(_SETTLE_S)
        _wait(lambda: _rests(agent), "a second of rest")
        began = _thread_ns(agent)
        time.sleep(rest_s)
        rest_ms = (_thread_ns(agent) - began) / 1e6 / rest_s
        began = _thread_ns(agent)
        outcomes = 0
        ours.send("ready")
        deadline = time.monotonic() + _PATIENCE_S
        while outcomes < waiting:
            outcomes += len(agent.outcomes())
            if time.monotonic() > deadline:
                raise BenchError(f"{outcomes} of {waiting} requests were told that their KV comes")
            time.sleep(0.005)
        return PeerCosts(rest_ms, (_thread_ns(agent) - began) / 1e6 / waiting)
    finally:
        agent.close()
        process.terminate()
        process.join()


def _agent() -> Agent:
    (group,) = _GEOMETRY.groups
    layer = torch.zeros(4, 1, group.page_size * 16, dtype=torch.bfloat16)
    keys = group.page_size * group.key_dim
    pages = LayerPages(
        layer[..., :keys].unflatten(2, (group.page_size, group.key_dim)),
        layer[..., keys:].unflatten(2, (group.page_size, group.value_dim)),
        (layer.view(torch.uint8),),
    )
    config = Config(transports=("shm",), slot_mib=1, slots=4, wait_timeout_s=3600.0)
    cache = PagedCache({0: pages}, _GEOMETRY)
    return Agent(config, "bench", _MODEL, cache, produces=False, consumes=True)


def _hold(agent: Agent, ports: list[int], waiting: int) -> None:
    for number in range(waiting):
        source = Source("127.0.0.1", ports[number % len(ports)], "")
        agent.submit(Hold(f"request {number}", f"{number}", (Peer(source, _SHARD),), watch=True))


def _sessions(agent: Agent) -> int:
    return int(agent.telemetry.gauges().get("producer_sessions", 0))


def _thread_ns(agent: Agent) -> int:
    ident = agent._thread._thread.ident
    assert ident is not None
    return time.clock_gettime_ns(time.pthread_getcpuclockid(ident))


def _rests(agent: Agent) -> bool:
    """Whether the agent's thread stays idle for the next second."""
    began = _thread_ns(agent)
    time.sleep(1.0)
    return _thread_ns(agent) - began < 1e6


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not all within {_PATIENCE_S:.0f} s")
        time.sleep(0.05)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise BenchError("the process that plays the producers does not answer")
    return pipe.recv()


def _ask(pipe: Connection, what: str) -> int:
    answer: int = _answer(pipe)
    pipe.send(what)
    return answer


def _play_producers(pipe: Connection, sessions: int) -> None:
    """Answer every consumer with `Welcome` and `Pulse`, and send `Ready` when the pipe says so."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = sessions + 100
    sockets = [context.socket(zmq.ROUTER) for _ in range(sessions)]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    pipe.send(ports)
    poller = zmq.Poller()
    poller.register(pipe.fileno(), zmq.POLLIN)
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    watched: list[tuple[zmq.Socket[bytes], bytes, str]] = []
    while True:
        for ready, _ in poller.poll():
            if isinstance(ready, int):
                if pipe.recv() == "watched":
                    pipe.send(len(watched))
                    continue
                for socket, sender, transfer in watched:
                    _say(socket, sender, messages.Ready(transfer))
                continue
            sender, data = ready.recv_multipart()
            match messages.decode_consumer_message(data):
                case messages.Hello():
                    _say(ready, sender, _welcome())
                case messages.Heartbeat():
                    _say(ready, sender, messages.Pulse(1))
                case messages.Watch(transfer):
                    watched.append((ready, sender, transfer))


def _say(socket: "zmq.Socket[bytes]", sender: bytes, message: messages.Message) -> None:
    socket.send_multipart([sender, messages.encode(message)])


def _welcome() -> messages.Welcome:
    return messages.Welcome(
        schema=messages.SCHEMA,
        engine_id="producer",
        epoch=os.getpid(),
        geometry=_GEOMETRY,
        codecs=["raw"],
        transport=ShmTransport.name,
        transport_address=_shm_address(),
        slot_bytes=1 << 20,
        read=True,
        facts=_MODEL,
        lease_ms=int(1000 * _LEASE_S),
    )


def _shm_address() -> bytes:
    return msgspec.msgpack.encode(
        ShmAddress("nobody", secrets.token_bytes(16), 4, 1 << 20, 4, 1 << 20)
    )
