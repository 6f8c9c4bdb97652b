# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what `pd-connector bench` runs.

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: what the figures were measured on, and what else ran there
- `contender`: who is compared, and what is asked of each
- `model`: a model with much KV and no weights
- `flow`: one request through a prefill and a decode engine
- `pair`: two engines, and requests through both
- `handoff`: pairs measured in turn, and what the measurements tell together
- `plan`: what `bench handoff` does, and doing it
- `wire`: ways to move KV without engines, measured in turn
- `wire_size`, `wire_cache`: how much that is, and a cache that both sides know
- `party`: a process that obeys calls, of `bench wire` and `bench handoff --gpu`
- `wire_movers`, `wire_party`, `wire_pair`: the ways; a process that goes one of them; two of these
- `reshard`: gather and scatter between engines that cut a model up differently
- `overhead`: what a request costs in Python
"""
