# SPDX-License-Identifier: Apache-2.0
"""Checks and benchmarks of the kernels on a GPU: `python -m pd_kernels.bench transfer` or
`decode`."""
