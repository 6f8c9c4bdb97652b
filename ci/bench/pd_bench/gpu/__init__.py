# SPDX-License-Identifier: Apache-2.0
"""`bench handoff --gpu`: KV moved between two processes on a GPU, without engines.

- `cache`: a rank's cache in a GPU's memory
- `endpoint`, `movers`: one NIXL agent with its peer; the ways in which contenders move KV over it
- `party`: the program of either process
- `bench`: starts both, measures contenders in turn, and compares them
"""
