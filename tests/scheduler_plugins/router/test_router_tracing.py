# SPDX-License-Identifier: Apache-2.0
"""Spans of a request, as a collector gets them over HTTP."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, answer, run, status, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector:
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"

    async def _take(self, request: web.Request) -> web.Response:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        raw = await request.read()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        told = service.ExportTraceServiceRequest.FromString(raw)
        for resource in told.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString())

    async def stop(self) -> None:
        await self._runner.cleanup()


def test_a_request_is_one_trace_from_the_client_to_both_engines() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

    async def scenario() -> None:
        collector = Collector()
        async with World(otlp=await collector.start()) as world:

            async def after_prefill(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                p = world.p[0]
                await until(
                    lambda: bool(p.headers) and not world.known(p).prefills, "P has answered"
                )
                return await answer(engine, request, body)

            world.d[0].behave = after_prefill
            body = {"model": "m", "prompt": "a"}
            asked = await world.post("/v1/completions", body, traceparent=PARENT)
            assert asked.status == 200
            seen = [fake.headers[0].getall("traceparent") for fake in (world.p[0], world.d[0])]
            world.d[0].behave = status(400)
            assert (await world.post("/v1/completions", body)).status == 400
        spans = {
            span.name: span for span in collector.spans if span.trace_id.hex() == TRACE
        }  # leaving the block has sent what was left
        assert set(spans) == {"router", "prefill", "transfer", "decode"}
        root = spans.pop("router")
        assert root.parent_span_id.hex() == "b7ad6b7169203331"
        assert {span.parent_span_id for span in spans.values()} == {root.span_id}
        for name, headers in zip(("prefill", "decode"), seen, strict=True):
            assert headers == [f"00-{TRACE}-{spans[name].span_id.hex()}-01"]
        transfer = spans["transfer"]
        assert spans["prefill"].end_time_unix_nano <= transfer.end_time_unix_nano
        assert transfer.end_time_unix_nano <= spans["decode"].end_time_unix_nano
        others = [span for span in collector.spans if span.trace_id.hex() != TRACE]
        assert "router" in {span.name for span in others}, "a request without a trace begins one"
        await collector.stop()

    run(scenario())


def test_without_a_collector_the_clients_trace_is_passed_on() -> None:
    async def scenario() -> None:
        async with World() as world:
            await world.post("/v1/completions", {"model": "m", "prompt": "a"}, traceparent=PARENT)
            for fake in (world.p[0], world.d[0]):
                assert fake.headers[0].getall("traceparent") == [PARENT]

    run(scenario())
