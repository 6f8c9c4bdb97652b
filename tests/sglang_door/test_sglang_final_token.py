# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine decided comes into the decode engine's row as SGLang itself would copy it."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.disaggregation.utils import MetadataBuffers

from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.sglang.final_token import read_row, write_row

ROOM = (1 << 62) + 5


def buffers() -> MetadataBuffers:
    """As an engine makes them; a row may hold what its last request left."""
    made = MetadataBuffers(4, 16, torch.float32, 0)
    for value in vars(made).values():
        if isinstance(value, torch.Tensor):
            value.fill_(3)
    made.bootstrap_room.fill_(0)
    return made


def request(top: int, *, logprobs: bool = True) -> Any:
    """A request whose prefill has ended, as far as `MetadataBuffers.set_buf` looks at it."""
    return SimpleNamespace(
        metadata_buffer_index=2,
        output_ids=[417],
        cached_tokens=96,
        cached_tokens_device=64,
        cached_tokens_host=32,
        cached_tokens_storage=0,
        get_mm_token_counts=lambda: (0, 0, 0),
        return_logprob=logprobs,
        logprob=SimpleNamespace(
            top_logprobs_num=top,
            output_token_logprobs_val=[-0.25],
            output_token_logprobs_idx=[417],
            output_top_logprobs_val=[[-0.25, -1.5, -4.0][:top]],
            output_top_logprobs_idx=[[417, 11, 90_000][:top]],
        ),
        return_sampling_mask=False,
        hidden_states_tensor=None,
        bootstrap_room=ROOM,
    )


@pytest.mark.parametrize("top", [0, 1, 3])
def test_a_row_arrives_as_it_was_filled(top: int) -> None:
    here, there, req = buffers(), buffers(), request(top)
    here.set_buf(req)
    words = read_row(here, 2, req, b"identity", "t")
    assert (words.transfer, words.identity, words.first_token) == ("t", b"identity", 417)
    write_row(there, 1, words, ROOM)
    for name in ("output_ids", "output_token_logprobs_val", "output_token_logprobs_idx"):
        assert getattr(there, name)[1, 0] == getattr(here, name)[2, 0], name
    for name in ("output_top_logprobs_val", "output_top_logprobs_idx"):
        assert torch.equal(getattr(there, name)[1, :top], getattr(here, name)[2, :top]), name
    assert torch.equal(there.cached_tokens[1, :7], here.cached_tokens[2, :7])
    assert int(there.bootstrap_room[1, 0]) == ROOM


def test_an_engine_that_tells_the_token_alone_leaves_nothing_of_the_last_request() -> None:
    there = buffers()
    write_row(there, 1, FinalToken("t", b"i", 5), ROOM)
    assert int(there.output_ids[1, 0]) == int(there.output_token_logprobs_idx[1, 0]) == 5
    assert float(there.output_token_logprobs_val[1, 0]) == 0.0
    assert not there.cached_tokens[1, :7].any()


def test_logprobs_that_nobody_asked_for_are_not_sent() -> None:
    here, req = buffers(), request(3, logprobs=False)
    here.set_buf(req)
    words = read_row(here, 2, req, b"identity", "t")
    assert (words.logprob, words.top_logprobs) == (None, [])
