# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what `pd-connector bench` runs.

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: what the figures were measured on, and what else ran there
- `pair`: a prefill and a decode engine, and one request through both
- `handoff`: pairs measured in turn
"""
