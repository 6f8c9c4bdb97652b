# SPDX-License-Identifier: Apache-2.0
"""Endpoints of an engine's API server that are not completions."""

GENERATE = "/inference/v1/generate"
"""vLLM's endpoint of token ids in and out (`--enable-scale-out`)."""
POOLING_PATHS = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""Endpoints that generate nothing."""
