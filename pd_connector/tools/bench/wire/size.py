# SPDX-License-Identifier: Apache-2.0
"""Sizes of what `bench wire` moves, in bfloat16."""

LAYERS = 32
KV_HEADS = 8
HEAD_DIM = 128
PAGE_TOKENS = 16
PAGE_BYTES = 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2
"""One page of one layer, K and V: 64 KiB."""
TOKEN_BYTES = LAYERS * PAGE_BYTES // PAGE_TOKENS
"""One token in all layers: 128 KiB."""
