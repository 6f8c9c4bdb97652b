# SPDX-License-Identifier: Apache-2.0
"""Simulation of engines and of clusters: it shows a policy's effect on a workload, in seconds instead of hours.

| modules, in reading order | what they are |
|---|---|
| `trace` | arriving requests |
| `cache`, `prefill`, `decode`, `engine` | one engine: its prefix cache, its two stages, the whole |
| `links`, `kv_pool` | KV between engines, and KV that all engines share |
| `node`, `journey` | an engine and a cluster as a policy sees them, and one request's way |
| `timeline`, `roles`, `cluster` | one heap of events, roles that change, and the whole cluster |
| `fleet`, `simulate`, `capacity` | unlike engines and their file, the way from settings to results, and the highest rate that keeps a promise |
| `report`, `picture`, `command` | the results in numbers, as a picture, and as a command |
| `mock/` | an engine with HTTP that takes its times from the same model |
"""
