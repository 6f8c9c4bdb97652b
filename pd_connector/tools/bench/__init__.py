# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what `pd-connector bench` runs.

What several share:

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: what the figures were measured on, and what else ran there
- `model`: a model with much KV and no weights
- `flow`: one request through a prefill and a decode engine
- `party`: a process that obeys calls, of `wire` and `gpu`

The benchmarks, one folder or file each:

- `handoff/`: engines with our connector beside engines with NixlConnector
- `wire/`: KV moved between two processes without engines
- `gpu/`: the same on a GPU
- `reshard`: gather and scatter between engines that cut a model up differently
- `codec`: coding on one core
- `overhead`: what a request costs in Python
- `peers`: what many sessions and waiting requests cost an agent
"""
