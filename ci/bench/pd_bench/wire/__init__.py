# SPDX-License-Identifier: Apache-2.0
"""`bench wire`: KV moved between two processes without engines, beside NIXL and plain TCP.

- `movers`: the ways in which contenders move it; the cache and ours are in `pd_connector/tools/wire.py`
- `party`: the program of either process; `pair`: both processes, as their launcher sees them
- `measure`: contenders measured in turn, and compared
"""
