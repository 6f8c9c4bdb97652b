# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of pd-connector, each beside its torch reference.

`transfer` moves KV between paged caches and payloads, reshards payloads and sums them; `decode` attends to
paged KV and merges what was found apart; `vllm` offers that to vLLM as attention backends. `bench` checks
and measures the kernels on a GPU. A module holds the Triton kernel, its thin typed wrapper and the
torch function that defines what it must compute. But for `vllm`, the package imports torch and Triton
only, which every engine brings.
"""
