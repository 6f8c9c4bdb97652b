# SPDX-License-Identifier: Apache-2.0
"""Memory that chunks pass through: slabs and their slots, pinned memory, pieces of memory."""
