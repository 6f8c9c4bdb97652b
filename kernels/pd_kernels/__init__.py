# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of pd-connector, each beside its torch reference.

`transfer` moves KV between paged caches and payloads, reshards payloads and sums them. `bench` checks
and measures the kernels on a GPU. `paged_decode` and `mla_decode` are to come. A module holds the
Triton kernel, its thin typed wrapper and the torch function that defines what it must compute. The
package imports torch and Triton, which every engine brings, and nothing of pd_connector.
"""
