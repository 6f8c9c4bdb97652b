# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of pd-connector, each with a reference in torch that defines what it computes.

`transfer` moves KV between paged caches and payloads, reshards payloads and sums them. `attention`
attends to paged KV, and merges partial results. `vllm` offers that to vLLM as attention backends.
`bench` checks and measures the kernels on a GPU.

`payload` and `checksum` define a payload's bytes. pd_connector's core takes them from here, so they
import neither torch nor Triton. The rest needs both, which every engine brings. Only `vllm` and
`sglang` import an engine. Nothing here imports pd_connector.
"""
