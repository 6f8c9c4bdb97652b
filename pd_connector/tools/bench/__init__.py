# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that `pd-connector bench` runs.

Shared by several of them:

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: the hardware of the measurement, and the other load on it
- `model`: a model with much KV and no weights
- `flow`: one request through a prefill and a decode engine
- `party`: a process that answers calls, for `wire` and `gpu`

The benchmarks, one folder or file each:

- `handoff/`: engines with our connector beside engines with NixlConnector
- `wire/`: KV moved between two processes without engines
- `gpu/`: the same on a GPU
- `reshard`: gather and scatter between engines that divide a model differently
- `codec`: coding on one core
- `overhead`: the cost of a request in Python
- `peers`: the cost of many sessions and waiting requests to an agent
"""
