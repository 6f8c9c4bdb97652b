# SPDX-License-Identifier: Apache-2.0
"""Checks and benchmarks of the kernels on a GPU: `python -m pd_bench.kernels transfer` or
`decode`."""
