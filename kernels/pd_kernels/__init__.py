# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of pd-connector, each beside its torch reference.

One module per kernel family will live here: `transfer` (gather pages into a slab and scatter
them back, resharding and transcoding on the way), `paged_decode`, `mla_decode`. A module holds the
Triton kernel, its thin typed wrapper and the torch function that defines what it must compute.
"""
