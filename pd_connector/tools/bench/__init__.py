# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench wire`, and what every benchmark shares. The other benchmarks are a distribution of their own, `ci/bench`.

- `sample`: repeated measurements of one quantity
- `report`: comparisons as a table, as JSON rows, and against their bars
- `machine`: the hardware of the measurement, and the other load on it
- `party`: a process that answers calls
- `wire/`: KV moved between two processes without engines
"""
