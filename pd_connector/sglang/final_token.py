# SPDX-License-Identifier: Apache-2.0
"""Final token in SGLang's form: a row of its metadata buffers. A decode engine reads the row when a request's KV has
arrived."""

from typing import Any

import torch

from pd_connector.protocol.wire.final_token import FinalToken, FirstDraft

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

_MOST_LIKELY = 1.001
"""Largest probability that passes: 1, rounded."""


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
        draft=_read_draft(buffers, row, req),
    )


def _read_draft(buffers: Any, row: int, req: Any) -> FirstDraft | None:
    """The first draft; none if the engine does not draft."""
    if req.hidden_states_tensor is None:
        return None
    count = len(req.output_topk_p)
    hidden = buffers.output_hidden_states[row].contiguous().view(torch.uint8)
    return FirstDraft(
        hidden=hidden.cpu().numpy().tobytes(),
        tokens=buffers.output_topk_index[row, :count].tolist(),
        probabilities=buffers.output_topk_p[row, :count].tolist(),
    )


def draft_problem(buffers: Any, final_token: FinalToken, drafted: int, vocabulary: int) -> str:
    """Why a decode engine that drafts cannot go on from this final token; empty if it can.

    Args:
        drafted: tokens of a first draft here.
        vocabulary: size of the draft model's vocabulary. SGLang would end the engine for a token that is not in it.
    """
    draft = final_token.draft
    if draft is None:
        return "no first draft came with it, and this engine drafts"
    hidden_bytes = buffers.output_hidden_states[0].nbytes
    tokens = {len(draft.tokens), len(draft.probabilities)}
    if tokens != {drafted} or len(draft.hidden) != hidden_bytes:
        return (
            f"a first draft of {len(draft.tokens)} tokens with {len(draft.hidden)} bytes of hidden state came: wanted "
            f"{drafted} tokens with {hidden_bytes} bytes"
        )
    likely = all(0 <= probability <= _MOST_LIKELY for probability in draft.probabilities)
    if not likely or max(draft.tokens) >= vocabulary:
        return (
            f"a first draft of tokens {draft.tokens} with probabilities {draft.probabilities}: wanted tokens below "
            f"{vocabulary} and probabilities from 0 to 1"
        )
    return ""


def _write_draft(buffers: Any, row: int, draft: FirstDraft) -> None:
    hidden, count = buffers.output_hidden_states, len(draft.tokens)
    octets = torch.frombuffer(bytearray(draft.hidden), dtype=torch.uint8)
    hidden[row] = octets.view(hidden.dtype)
    buffers.output_topk_index[row, :count] = torch.tensor(draft.tokens, dtype=torch.int64)
    buffers.output_topk_p[row, :count] = torch.tensor(draft.probabilities, dtype=torch.float32)


def write_row(
    buffers: Any, row: int, final_token: FinalToken, room: int, *, drafts: bool = False
) -> None:
    """Fill a request's row. The room is written last: SGLang takes a row for complete once its room is set.

    Args:
        drafts: this engine drafts, and `draft_problem` has found nothing. Otherwise a draft is left out.
    """
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
    if drafts and final_token.draft is not None:
        _write_draft(buffers, row, final_token.draft)
    buffers.bootstrap_room[row, 0] = room
