# SPDX-License-Identifier: Apache-2.0
"""Simulation of engines and of clusters: it shows a policy's effect on a workload, in seconds instead of hours.

In reading order: `trace` and `workload` (arriving requests), `cache` (an engine's prefix cache), `prefill` and `decode`
(the two stages of an engine), `engine` (one engine), `links` (KV between engines), `kv_pool` (KV that all engines
share), `node` (an engine as a policy sees it), `view`, `journey`, `timeline` (one heap of events), `cluster` (the
whole), `report` and `picture` (the results), `simulate` (from settings to results), `command`. `mock/` is an engine
with HTTP that takes its times from the same model.
"""
