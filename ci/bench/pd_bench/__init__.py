# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one folder each. `pip install ./ci/bench` makes them commands of `pd-connector bench`.

- `handoff`: engines with our connector beside engines with their own; `gpu`: the same without engines, on a GPU
- `states`: handoffs of models with states, drafts, and context parallelism
- `serve`: a whole stack of router and engines beside vLLM's
- `pool`: the KV pool beside recomputation, Mooncake and LMCache
- `router`: our router beside others, in front of mock engines
- `roles`: elastic roles beside fixed ones, simulated
- `scheduler`: the engine's queue, admission and eviction beside the engines' own
- `core`: costs of the connector's parts
- `kernels`: the GPU kernels, checked and measured: `python -m pd_bench.kernels`

- `wire`: the same as pd-connector's own `bench wire`, which it replaces, beside NIXL and plain TCP, also over a limited link

What all of them share:

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: the hardware of the measurement, and the other load on it
- `command_output`: what every command prints, and its exit codes
- `party`: a process that answers calls
- `netns`: two network namespaces joined by a limited link
"""
