# SPDX-License-Identifier: Apache-2.0
"""The engines as the router knows them: state, connections, load and caches.

| modules | what they are |
|---|---|
| `engine`, `ranks`, `kinds` | one engine, its data-parallel ranks, the differences between vLLM and SGLang |
| `exchange` | one request to one engine, watched until its end |
| `connections`, `connection`, `answer` | HTTP to engines: the pool of connections, one connection, one streamed
answer |
| `inquiry` | the router's own questions to one engine |
| `watch`, `engine_set`, `pool`, `circuit` | the task that watches one engine, all engines, and the circuit breaker of
one |
| `counted_load`, `others`, `engine_reports` | the load of engines: counted here, counted by other routers, reported
by engines |
| `caches` | the cached blocks of engines |
"""
