# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: from a finished prefill to the first decoded token, through real engines.

- `contender`: the connectors that are compared, and the bar of each
- `pair`: two engines, and requests through both
- `measure`: pairs measured in turn, and what the measurements tell together
- `bench`: starts the engines, measures, and ends them
"""
