# SPDX-License-Identifier: Apache-2.0
"""`bench wire`: KV moved between two processes without engines.

- `size`, `cache`: how much is moved, and a cache whose content both sides know
- `movers`: the ways in which contenders move it
- `party`: the program of either process; `pair`: both processes, as their launcher sees them
- `measure`: contenders measured in turn, and compared
"""
