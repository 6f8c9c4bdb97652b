# SPDX-License-Identifier: Apache-2.0
"""KV that outlives its request and its engine: the keys of chunks, their records and bytes at rest, and the stores that keep them."""
