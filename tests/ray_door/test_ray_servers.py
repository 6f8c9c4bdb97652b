# SPDX-License-Identifier: Apache-2.0
"""What a decode replica does when the prefill side is not there, fails, or is slow; without a cluster."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import (
    CompletionRequest,
    ErrorInfo,
    ErrorResponse,
)
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDOrchestratorMixin

from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.ray import servers
from pd_connector.ray.backend import PDConnectorBackend
from pd_connector.ray.servers import ConcurrentDecode, LeaseKeeper, _leases_end

ADDRESS = ProducerAddress("p", (Peer(Source("127.0.0.1", 7000, "p"), Shard(0, 4, 0, 1)),))
KV = "with KV"
ALONE = "alone"
HANG = object()


class Engine:
    """The decode engine: says whether a request had KV to fetch, in three parts."""

    def __init__(self):
        self.kv_comes = asyncio.Event()
        self.open = 0

    async def completions(self, request, raw_request_info=None):
        return self._answer(request)

    async def _answer(self, request):
        fetches = request.kv_transfer_params is not None
        self.open += 1
        try:
            if fetches:
                await self.kv_comes.wait()
            for n in range(3):
                yield f"{KV if fetches else ALONE} {n}"
        finally:
            self.open -= 1


class Prefill:
    """The handle of a prefill deployment with one replica."""

    def __init__(self, engine, *, answer="done", bind=None, node="here"):
        self.engine, self.answer, self.bind = engine, answer, bind
        self.metadata = {**ADDRESS.fields(), "ray_node_id": node}
        self.sent = []
        self.reserved = self.drained = 0
        self.ended = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.completions = self

    def options(self, **kwargs):
        return self

    @contextlib.asynccontextmanager
    async def choose_replica(self, request):
        if isinstance(self.bind, Exception):
            raise self.bind
        if self.bind is HANG:
            await asyncio.Event().wait()
        self.reserved += 1
        try:
            yield SimpleNamespace(replica_metadata=self.metadata, replica_id="p")
        finally:
            self.reserved -= 1

    async def dispatch(self, selection, request, raw_request_info):
        self.sent.append(request)
        await asyncio.sleep(0)
        if self.answer is HANG:
            self.engine.kv_comes.set()
            await self.goes_on.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer == "done":
            self.engine.kv_comes.set()
        yield self.answer
        self.drained += 1
        self.ended.set()


class Decode(ConcurrentDecode, PDOrchestratorMixin, Engine):
    def __init__(self, connect_timeout_s=5.0, **prefill):
        Engine.__init__(self)
        self.prefill = self._prefill_handle = Prefill(self, **prefill)
        self._connector_backend_cache = PDConnectorBackend(SimpleNamespace(engine_kwargs={}))
        self._connector_backend_cache._node_id = "here"
        self._connector_backend_cache.config = Config(connect_timeout_s=connect_timeout_s)
        self.outcomes = []

    def _count(self, outcome):
        self.outcomes.append(outcome)

    async def ask(self, **fields):
        request = CompletionRequest(model="m", prompt="hello", **fields)
        return [chunk async for chunk in self.answer(request)]

    def answer(self, request):
        return self._pd_handle_request(request)

    async def check_nothing_left(self):
        assert self.open == 0
        await asyncio.gather(*servers._prefills_under_way)
        assert self.prefill.reserved == 0


def parts(kind):
    return [f"{kind} {n}" for n in range(3)]


def test_both_engines_are_asked_at_the_same_time():
    async def run():
        decode = Decode()
        assert await decode.ask() == parts(KV)
        (sent,) = decode.prefill.sent
        assert sent.kv_transfer_params["do_remote_decode"]
        assert decode.outcomes == ["handed_over"]
        assert decode.prefill.drained == 1
        await decode.check_nothing_left()

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        ConnectionError("the replica died"),
        asyncio.CancelledError(),
        ErrorResponse(error=ErrorInfo(message="no room", type="x", code=400)),
    ],
)
def test_a_prefill_that_fails_is_computed_here(answer):
    """Its KV never comes: without this the request would wait for it."""

    async def run():
        decode = Decode(answer=answer)
        assert await decode.ask() == parts(ALONE)
        assert decode.outcomes == ["prefill_failed"]
        await decode.check_nothing_left()

    asyncio.run(run())


def test_rays_own_server_fails_such_a_request():
    """The control: what a client gets without our decode server."""

    class Rays(PDOrchestratorMixin, Engine):
        pass

    async def run():
        decode = Decode(answer=ConnectionError("the replica died"))
        rays = Rays()
        rays._prefill_handle = decode.prefill
        rays._connector_backend_cache = decode._connector_backend_cache
        with pytest.raises(ConnectionError):
            async for _ in rays._pd_handle_request(CompletionRequest(model="m", prompt="hello")):
                pass

    asyncio.run(run())


@pytest.mark.parametrize("bind", [RuntimeError("too many wait"), HANG])
def test_without_a_prefill_replica_the_prompt_is_computed_here(bind):
    async def run():
        decode = Decode(connect_timeout_s=0.05, bind=bind)
        assert await decode.ask() == parts(ALONE)
        assert decode.outcomes == ["unbound"]
        decode.prefill.bind = None
        decode._patience._no_wait_before = 0.0  # time to look again
        assert await decode.ask() == parts(KV)
        assert decode.outcomes[1:] == ["handed_over"]
        await decode.check_nothing_left()

    asyncio.run(run())


def test_a_prefill_replica_that_cannot_be_reached_is_not_asked():
    async def run():
        decode = Decode(node="elsewhere")  # a loopback address of another node
        assert await decode.ask() == parts(ALONE)
        assert decode.outcomes == ["unreachable"]
        assert decode.prefill.sent == []
        await decode.check_nothing_left()

    asyncio.run(run())


def test_what_one_transfer_cannot_carry_asks_no_prefill_replica():
    async def run():
        decode = Decode()
        assert await decode.ask(n=2) == parts(ALONE)
        assert decode.outcomes == ["several_answers"]
        assert decode.prefill.sent == []

    asyncio.run(run())


def test_a_client_that_hangs_up_leaves_nothing():
    async def run():
        decode = Decode()
        request = CompletionRequest(model="m", prompt="hello")
        answer = decode.answer(request)
        assert await anext(answer) == f"{KV} 0"
        await answer.aclose()
        await decode.check_nothing_left()
        assert decode.prefill.drained == 1

    asyncio.run(run())


def test_an_answer_does_not_wait_for_a_prefill_replica_that_hangs():
    """Its place is kept until it ends, as Ray wants."""

    async def run():
        decode = Decode(answer=HANG)
        assert await decode.ask() == parts(KV)
        assert decode.prefill.reserved == 1
        decode.prefill.goes_on.set()
        await decode.check_nothing_left()

    asyncio.run(run())


def test_a_client_that_hangs_up_before_the_first_token_leaves_nothing():
    async def run():
        decode = Decode(answer="slow")
        asking = asyncio.ensure_future(decode.ask())
        await decode.prefill.ended.wait()
        assert decode.open == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await decode.check_nothing_left()

    asyncio.run(run())


def test_a_prefill_that_serve_cancels_after_its_client_has_gone_leaves_its_place():
    """Serve cancels what a cancelled request has sent to other replicas."""

    async def run():
        decode = Decode(answer=HANG)
        prefill = decode.prefill
        answer = decode.answer(CompletionRequest(model="m", prompt="hello"))
        assert await anext(answer) == f"{KV} 0"
        prefill.answer = asyncio.CancelledError()
        await answer.aclose()
        assert prefill.reserved == 1
        prefill.goes_on.set()
        await decode.check_nothing_left()

    asyncio.run(run())


class Held:
    """An engine whose KV is fetched after some looks."""

    def __init__(self, looks):
        self.looks = looks
        self.closed = False

    async def collective_rpc(self, method):
        assert method == "outgoing_transfers"
        if self.looks is None:
            raise RuntimeError("no such method")
        self.looks -= 1
        return [0, max(0, self.looks)]

    async def shutdown(self):
        self.closed = True


@pytest.fixture
def replica(monkeypatch):
    context = SimpleNamespace(_deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=60.0))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    return context._deployment_config


def test_a_replica_ends_when_its_kv_has_been_fetched(replica):
    engine = Held(3)
    asyncio.run(_leases_end(engine))
    assert engine.looks == 0


def test_it_does_not_wait_longer_than_serve(replica):
    replica.graceful_shutdown_timeout_s = 0.1
    engine = Held(10**9)
    asyncio.run(_leases_end(engine))
    assert engine.looks > 0


def test_an_engine_that_cannot_tell_is_not_waited_for(replica):
    asyncio.run(_leases_end(Held(None)))


def test_serve_ends_a_prefill_replica_by_this(replica):
    class Server:
        def __init__(self):
            self.engine = Held(1)

        async def __del__(self):
            await self.engine.shutdown()

    class Keeper(LeaseKeeper, Server):
        pass

    keeper = Keeper()
    asyncio.run(keeper.__del__())
    assert keeper.engine.closed
    type(keeper).__del__ = lambda self: None  # the collector calls it once more
