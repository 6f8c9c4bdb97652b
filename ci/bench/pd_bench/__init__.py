# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one folder each. `pip install ./ci/bench` makes them commands of `pd-connector bench`.

- `handoff`: engines with our connector beside engines with their own; `gpu`: the same without engines, on a GPU
- `serve`: a whole stack of router and engines beside vLLM's
- `pool`: the KV pool beside recomputation, Mooncake and LMCache
- `router`: our router beside others, in front of mock engines
- `roles`: elastic roles beside fixed ones, simulated
- `scheduler`: the engine's queue, admission and eviction beside the engines' own
- `core`: costs of the connector's parts
- `kernels`: the GPU kernels, checked and measured: `python -m pd_bench.kernels`

`pd-connector bench wire` comes with pd-connector itself, and so does what all of them share: `pd_connector/tools/bench`.
"""
