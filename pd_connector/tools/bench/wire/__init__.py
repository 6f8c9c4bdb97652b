# SPDX-License-Identifier: Apache-2.0
"""`bench wire`: KV moved between two processes without engines.

- `size`, `cache`: how much is moved, and a cache whose content both sides know
- `movers`: how each contender moves it
- `party`: the program of either process; `pair`: both of them, as their launcher sees them
- `measure`: contenders measured in turn, and compared
"""
