# SPDX-License-Identifier: Apache-2.0
"""NIXL: one-sided writes and reads over RDMA, NVLink or UCX."""
