# SPDX-License-Identifier: Apache-2.0
"""The engines as the router knows them: one, all, what they are busy with and what they have cached.

| modules | what they are |
|---|---|
| `engine`, `ranks`, `kinds` | one engine, its data-parallel ranks, what differs between vLLM and SGLang |
| `exchange` | one request to one engine, watched until its end |
| `connections`, `connection`, `answer` | HTTP to engines: connections that are used again, one of them, an answer as it comes |
| `inquiry`, `addresses` | what one engine answers to the router's own questions |
| `watch`, `engine_set`, `pool`, `circuit` | the task that watches one, all engines, when one gets a pause |
| `counted_load`, `others`, `engine_reports` | what engines are busy with: counted here, told by other routers, told by engines |
| `caches` | what engines have cached |
"""
