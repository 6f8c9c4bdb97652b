# SPDX-License-Identifier: Apache-2.0
"""Simulation of engines and of a cluster of them: what a policy does to a workload, in seconds
instead of hours.

In reading order: `trace` and `workload` (what arrives), `cache` (an engine's prefix cache),
`prefill` and `decode` (the two stages of an engine), `engine` (one engine), `links` (KV between
engines), `kv_pool` (KV that all engines share), `node` (an engine as a policy sees it), `view`,
`journey`, `timeline` (one heap of events), `cluster` (all of it), `report` and `picture` (what came out), `simulate` (from settings to results),
`command`. `mock/` is an engine that speaks HTTP and takes its times from the same model.
"""
