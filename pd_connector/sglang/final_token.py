# SPDX-License-Identifier: Apache-2.0
"""Final token in SGLang's form: a row of its metadata buffers. A decode engine reads the row when a request's KV has
arrived."""

from typing import Any

import torch

from pd_connector.protocol.wire.final_token import FinalToken

_COUNTS = (
    "cached_tokens",
    "cached_tokens_device",
    "cached_tokens_host",
    "cached_tokens_storage",
    "image_tokens",
    "audio_tokens",
    "video_tokens",
)
"""SGLang's meaning of the first places of a row of `cached_tokens`."""


def read_row(buffers: Any, row: int, req: Any, identity: bytes, transfer: str) -> FinalToken:
    """The final token of a request whose prefill has ended.

    Args:
        buffers: SGLang's `MetadataBuffers`.
        row: the request's row, filled.
    """
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    if req.return_logprob:
        logprob = float(buffers.output_token_logprobs_val[row, 0])
        count = min(req.logprob.top_logprobs_num, buffers.output_top_logprobs_idx.shape[1])
        tokens = buffers.output_top_logprobs_idx[row, :count].tolist()
        top = list(zip(tokens, buffers.output_top_logprobs_val[row, :count].tolist(), strict=True))
    counts = buffers.cached_tokens[row, : len(_COUNTS)].tolist()
    return FinalToken(
        transfer=transfer,
        identity=identity,
        first_token=int(buffers.output_ids[row, 0]),
        logprob=logprob,
        top_logprobs=top,
        counts={name: count for name, count in zip(_COUNTS, counts, strict=True) if count},
    )


def write_row(buffers: Any, row: int, final_token: FinalToken, room: int) -> None:
    """Fill a request's row. The room is written last: SGLang takes a row for complete once its room is set."""
    buffers.output_ids[row, 0] = final_token.first_token
    counts = [final_token.counts.get(name, 0) for name in _COUNTS]
    buffers.cached_tokens[row, : len(counts)] = torch.tensor(counts, dtype=torch.int32)
    buffers.output_token_logprobs_val[row, 0] = (
        final_token.logprob if final_token.logprob is not None else 0.0
    )
    buffers.output_token_logprobs_idx[row, 0] = final_token.first_token
    # Rows are reused: the final_token of an earlier request must not remain.
    buffers.output_top_logprobs_idx[row] = 0
    buffers.output_top_logprobs_val[row] = 0.0
    count = min(len(final_token.top_logprobs), buffers.output_top_logprobs_idx.shape[1])
    if count:
        tokens, logprobs = zip(*final_token.top_logprobs[:count], strict=True)
        buffers.output_top_logprobs_idx[row, :count] = torch.tensor(tokens, dtype=torch.int32)
        buffers.output_top_logprobs_val[row, :count] = torch.tensor(logprobs, dtype=torch.float32)
    buffers.bootstrap_room[row, 0] = room
