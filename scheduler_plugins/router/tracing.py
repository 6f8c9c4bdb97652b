# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of a request: `router`, and in it `prefill`, `transfer` and `decode`.

Each engine gets the `traceparent` of its own span, so the engine's spans lie inside it. `transfer` lasts from the end
of prefill to the decode engine's first bytes. Without `--otlp`, the client's `traceparent` is passed on unchanged, at
no cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from multidict import CIMultiDict

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE = "pd-router"


class Trace(Protocol):
    """The spans of one request."""

    def begin(self, name: str, engine: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Begin a span. Returns the headers for the engine's request."""

    def end(self, name: str, error: str = "") -> None:
        """End a span. Does nothing if the span has ended or was never begun."""

    def answered(self) -> None:
        """The decode engine's first bytes have come."""

    def finish(self, outcome: str) -> None:
        """The request has ended: end every open span."""


class NoTrace:
    """`Trace` of a router without tracing."""

    def begin(self, name: str, engine: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return headers

    def end(self, name: str, error: str = "") -> None:
        pass

    def answered(self) -> None:
        pass

    def finish(self, outcome: str) -> None:
        pass


class Tracing:
    """Makes traces, and sends them to a collector from its own thread."""

    def __init__(self, endpoint: str) -> None:
        """Send nothing yet.

        Args:
            endpoint: URL of the collector, OTLP over HTTP; empty: nothing is traced.

        Raises:
            ModuleNotFoundError: the extra `otel` is not installed.
        """
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        if not endpoint:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE)

    def request(self, headers: Mapping[str, str], route: str, request_id: str) -> Trace:
        """The trace of a new request. It is a part of the client's trace, if there is one."""
        if self._tracer is None:
            return NoTrace()
        return _Spans(self._tracer, headers, route, request_id)

    @contextmanager
    def move(self, engine: str, before: str, after: str, why: str) -> Iterator[MoveSpan]:
        """The span of a change of an engine's role."""
        if self._tracer is None:
            yield MoveSpan(None)
            return
        attributes = {
            "server.address": engine,
            "role.from": str(before),
            "role.to": str(after),
            "cause": why,
        }
        span = self._tracer.start_span("role move", attributes=attributes)
        try:
            yield MoveSpan(span)
        finally:
            span.end()

    def close(self) -> None:
        """Send the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


class MoveSpan:
    """The span of one change of a role."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def failed(self, why: str) -> None:
        """The move failed."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, why)


class _Spans:
    def __init__(
        self, tracer: Tracer, headers: Mapping[str, str], route: str, request_id: str
    ) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        lower = {name.lower(): value for name, value in headers.items()}
        self._root = tracer.start_span(
            "router",
            context=self._propagator.extract(lower),
            kind=SpanKind.SERVER,
            attributes={"http.route": route, "request.id": request_id},
        )
        self._open: dict[str, Span] = {}
        self._prefilled_ns = 0

    def begin(self, name: str, engine: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self.end(name, "another attempt")
        inside = set_span_in_context(self._root)
        attributes = {"server.address": engine}
        self._open[name] = span = self._tracer.start_span(
            name, context=inside, kind=SpanKind.CLIENT, attributes=attributes
        )
        context: dict[str, str] = {}
        self._propagator.inject(context, set_span_in_context(span))
        sent = CIMultiDict(headers)
        for header in ("traceparent", "tracestate"):
            sent.popall(header, None)
        sent.update(context)
        return sent

    def end(self, name: str, error: str = "") -> None:
        span = self._open.pop(name, None)
        if span is None:
            return
        if name == "prefill" and not error:
            self._prefilled_ns = time.time_ns()
        self._end(span, error)

    def answered(self) -> None:
        from opentelemetry.trace import set_span_in_context

        if self._prefilled_ns:
            inside = set_span_in_context(self._root)
            self._tracer.start_span("transfer", context=inside, start_time=self._prefilled_ns).end()
            self._prefilled_ns = 0

    def finish(self, outcome: str) -> None:
        for name in list(self._open):
            self.end(name, "" if outcome == "ok" else outcome)
        self._root.set_attribute("outcome", outcome)
        self._end(self._root, "" if outcome in ("ok", "client_error") else outcome)

    def _end(self, span: Span, error: str) -> None:
        from opentelemetry.trace import StatusCode

        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end()
