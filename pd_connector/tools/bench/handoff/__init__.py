# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: from a finished prefill to the first decoded token, through real engines.

- `contender`: a connector that is compared, and its bars
- `pair`: two engines, and requests through both
- `line_up`: what can be compared on one kind of engine
- `vllm`, `sglang`: those there are
- `cross`: engines of two kinds, beside pairs of one kind
- `ray`, `ray_stack`: the same through Ray Serve, beside Ray's own connector
- `nixl_host_memory`: SGLang's baseline where there is no GPU
- `measure`: pairs measured in turn, and what the measurements tell together
- `receiving`: what receiving costs a decode engine
- `bench`: starts the engines, measures, and ends them
"""
