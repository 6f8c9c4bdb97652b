# SPDX-License-Identifier: Apache-2.0
"""The carrier: one process of a host that moves chunks between the host's pool and a far store."""
