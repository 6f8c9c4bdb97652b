# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: from a finished prefill to the first decoded token, through real engines.

- `contender`: a connector to compare, and its bars
- `pair`: two engines, and requests through both
- `line_up`: contenders that can be compared on one kind of engine
- `vllm`, `sglang`: these two kinds
- `cross`: engines of two kinds, beside pairs of one kind
- `ray`, `ray_stack`: the same through Ray Serve, beside Ray's own connector
- `nixl_host_memory`: SGLang's baseline on a machine without a GPU
- `measure`: measures pairs in turn, and compares them
- `receiving`: the cost of receiving to a decode engine
- `bench`: starts the engines, measures, and ends them
"""
