# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of pd-connector, each with a reference in torch that defines what it computes.

`transfer` moves KV between paged caches and payloads, reshards payloads and sums them. `attention`
attends to paged KV, and merges partial results. `vllm` offers that to vLLM as attention backends.
`bench` checks and measures the kernels on a GPU.

Only `vllm` imports an engine. The rest needs torch and Triton, which every engine brings.
`transfer` also needs `pd_connector.kv`, which defines the payload's format and imports neither
torch nor Triton.
"""
