# SPDX-License-Identifier: Apache-2.0
"""Drafts (speculative decoding) in SGLang's own pools and buffers: the draft model's KV, and what it goes on from."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang_door.door import ROOM, Pair, make_request, reach
from sglang_door.test_sglang_cache import NAMED, full_attention, latents, slots_of, with_windows
from support.agents import until

from pd_connector.errors import Cause, ConfigError, UnsupportedGeometryError
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.protocol.wire.final_token import FirstDraft, needs_drafts
from pd_connector.sglang.cache import DraftPool, describe_cache, own_shard
from pd_connector.sglang.drafts import drafts_of
from pd_connector.sglang.failure import TransferError
from pd_connector.sglang.final_token import draft_problem, read_row, write_row

TOPK = 2


def drafting() -> Any:
    """A request whose prefill and first draft have ended."""
    req = make_request()
    req.hidden_states_tensor = torch.randn(16)
    req.output_topk_p = torch.tensor([0.5, 0.25])
    req.output_topk_index = torch.tensor([5, 7])
    req.output_dsa_topk_indices = None
    return req


def row(pair: Pair, engine: Any, number: int) -> list[torch.Tensor]:
    buffers = engine.rank.buffers
    topk = (buffers.output_topk_p[number, :TOPK], buffers.output_topk_index[number, :TOPK])
    return [*topk, buffers.output_hidden_states[number]]


def handed_over(pair: Pair, req: Any, polls: KVPoll = KVPoll.Success) -> Any:
    """The request's receiver, when its transfer has ended so."""
    sender, receiver = pair.sender(req), pair.receiver(req)
    pair.send_all(sender, req)
    states = {KVPoll.WaitingForInput, KVPoll.Failed}
    until(lambda: receiver.poll() in states, "known")
    if receiver.poll() == KVPoll.WaitingForInput:
        receiver.send_metadata(pair.pages(pair.d), 2, [], decode_prefix_len=0)
    reach(receiver.poll, polls)
    return receiver


@pytest.mark.parametrize("made", [full_attention, latents], ids=["heads", "latents"])
def test_kv_of_the_draft_model_passes_and_drafting_goes_on_from_the_first_draft(made: Any) -> None:
    """Between pages of unlike sizes, beside the model's own KV."""
    drafts = made(16), made(1)
    pair = Pair((16, 1), drafts=drafts, drafted=(TOPK, TOPK))
    try:
        req = drafting()
        handed_over(pair, req)
        pair.assert_same_slots("k_buffer")
        for engine, draft in zip((pair.p, pair.d), drafts, strict=True):
            engine.pool = draft
        names = ["kv_buffer"] if made is latents else ["k_buffer", "v_buffer"]
        for name in names:
            pair.assert_same_slots(name)
        sent, got = row(pair, pair.p, 1), row(pair, pair.d, 2)
        assert all(map(torch.equal, sent, got))
        assert torch.equal(got[2], req.hidden_states_tensor)
    finally:
        pair.close()


def test_a_decode_engine_that_does_not_draft_gets_no_draft() -> None:
    """It may be of a version that does not know the field."""
    pair = Pair(drafts=(full_attention(16), None), drafted=(TOPK, 0))
    try:
        handed_over(pair, drafting())
        pair.assert_same_slots("k_buffer")
        assert not row(pair, pair.d, 2)[2].any()
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("drafts", "drafted", "cause", "told"),
    [
        ((False, True), (0, TOPK), Cause.DRAFT, "the producer has no draft model"),
        (
            (True, True),
            (1, TOPK),
            Cause.WORDS,
            "first_draft of 2 tokens .* first_draft of 1 tokens",
        ),
    ],
    ids=["no draft model", "another form"],
)
def test_a_prefill_engine_that_drafts_otherwise_is_refused_with_both(
    drafts: tuple[bool, bool], drafted: tuple[int, int], cause: Cause, told: str
) -> None:
    pools = tuple(full_attention(16) if drafting else None for drafting in drafts)
    pair = Pair(drafts=pools, drafted=drafted)  # type: ignore[arg-type]
    try:
        receiver = handed_over(pair, drafting(), KVPoll.Failed)
        with pytest.raises(TransferError, match=told):
            receiver.failure_exception()
        assert receiver._failure[0] is cause
    finally:
        pair.close()


def test_a_first_token_without_its_draft_is_not_used() -> None:
    pair = Pair(drafts=(full_attention(16), full_attention(16)), drafted=(TOPK, TOPK))
    try:
        receiver = handed_over(pair, make_request(), KVPoll.Failed)
        with pytest.raises(TransferError, match="no first draft came"):
            receiver.failure_exception()
        assert int(pair.d.rank.buffers.bootstrap_room[2, 0]) == 0
    finally:
        pair.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_draft_of_other_sizes_is_refused_with_both(dtype: torch.dtype) -> None:
    here, there = MetadataBuffers(4, 16, dtype, 0), MetadataBuffers(4, 16, dtype, 0)
    req = drafting()
    here.set_buf(req)
    token = read_row(here, 1, req, b"i", "t")
    assert draft_problem(there, token, TOPK, 259) == ""
    write_row(there, 2, token, ROOM)
    assert not there.output_hidden_states[2].any(), "nobody has checked it"
    write_row(there, 3, token, ROOM, drafts=True)
    assert torch.equal(there.output_hidden_states[3], here.output_hidden_states[1])
    assert isinstance(token.draft, FirstDraft)
    short = msgspec.structs.replace(token.draft, hidden=token.draft.hidden[:-1])
    assert "wanted 2 tokens with" in draft_problem(
        there, msgspec.structs.replace(token, draft=short), TOPK, 259
    )
    assert "came: wanted 1 tokens" in draft_problem(there, token, 1, 259)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 259]},
        {"probabilities": [0.5, math.nan]},
        {"probabilities": [0.5, 1e300]},
        {"probabilities": [-0.5, 0.5]},
    ],
    ids=["token", "nan", "infinite as float32", "negative"],
)
def test_a_first_draft_that_would_end_the_engine_is_refused(changes: Any) -> None:
    buffers, req = MetadataBuffers(4, 16, torch.float32, 0), drafting()
    buffers.set_buf(req)
    token = read_row(buffers, 1, req, b"i", "t")
    assert isinstance(token.draft, FirstDraft)
    draft = msgspec.structs.replace(token.draft, **changes)
    problem = draft_problem(buffers, msgspec.structs.replace(token, draft=draft), TOPK, 259)
    assert "wanted tokens below 259 and probabilities from 0 to 1" in problem


@pytest.mark.parametrize(("vocabulary", "ends"), [(7, KVPoll.Failed), (8, KVPoll.Success)])
def test_a_first_draft_has_tokens_of_the_draft_models_vocabulary(
    vocabulary: int, ends: KVPoll
) -> None:
    """SGLang looks them up in the draft worker's map, and ends for a token behind its end."""
    pair = Pair(drafts=(full_attention(16), full_attention(16)), drafted=(TOPK, TOPK))
    pair.d.rank.draft_vocabulary = vocabulary
    try:
        receiver = handed_over(pair, drafting(), ends)
        if ends == KVPoll.Failed:
            with pytest.raises(TransferError, match="wanted tokens below 7 "):
                receiver.failure_exception()
    finally:
        pair.close()


def test_drafts_beside_other_pools_are_named() -> None:
    pool = with_windows(16)
    with pytest.raises(
        UnsupportedGeometryError, match="SWAKVPool of the model and MHATokenToKVPool"
    ):
        describe_cache(
            pool,
            NAMED,
            own_shard(pool, 0, 1),
            sliding_window=20,
            draft=DraftPool(full_attention(16), NAMED),
        )
    pool = full_attention(16)
    with pytest.raises(UnsupportedGeometryError, match="pages of 16 tokens, and of 1 in the draft"):
        describe_cache(
            pool, NAMED, own_shard(pool, 0, 1), draft=DraftPool(full_attention(1), NAMED)
        )


def test_layers_of_the_draft_model_have_numbers_of_their_own() -> None:
    pool = full_attention(16)
    named = {number: {4} for number in (61, 62, 63)}  # some drafts count on from the model's layers
    draft = DraftPool(full_attention(16, dtype=torch.float8_e4m3fn), named, {62: (0.5, 2.0)})
    cache = describe_cache(pool, NAMED, own_shard(pool, 0, 1), draft=draft)
    assert cache.geometry.groups[-1].scales == ((1.0, 1.0), (0.5, 2.0), (1.0, 1.0))
    assert cache.geometry.groups[-1].layers == tuple(range(DRAFT_LAYERS, DRAFT_LAYERS + 3))
    assert slots_of([1], 16).tolist()[0] == 16


def queue(runners: int, pool: Any = "pool", token_map: torch.Tensor | None = None) -> Any:
    worker = SimpleNamespace(
        draft_worker=SimpleNamespace(hot_token_id=token_map),
        _draft_model_runners=lambda: (SimpleNamespace(model=torch.nn.Module()),) * runners,
    )
    return SimpleNamespace(
        draft_token_to_kv_pool=pool,
        scheduler=SimpleNamespace(
            draft_worker=worker, model_config=SimpleNamespace(vocab_size=259)
        ),
        metadata_buffers=MetadataBuffers(4, 24, torch.bfloat16, 0),
    )


def test_an_engine_says_the_form_of_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_eagle_topk=TOPK)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    found = drafts_of(queue(1))
    assert found is not None
    assert found.form == "first_draft of 2 tokens with 24 elements of bfloat16, token map none"
    assert found.vocabulary == 259
    assert needs_drafts(["first_token", found.form])
    assert not needs_drafts(["first_token"])
    assert drafts_of(SimpleNamespace(scheduler=SimpleNamespace(draft_worker=None))) is None
    for other, told in ((queue(2), "2 draft models"), (queue(1, None), "without a KV pool")):
        with pytest.raises(ConfigError, match=told):
            drafts_of(other)


def test_drafts_of_another_token_map_have_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_eagle_topk=TOPK)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    maps = None, torch.tensor([3, 5, 250]), torch.tensor([3, 5, 251]), torch.tensor([3, 5, 250])
    found = [drafts_of(queue(1, token_map=each)) for each in maps]
    forms = [each.form for each in found if each is not None]
    assert len(set(forms)) == 3
    assert forms[1] == forms[3]
    assert [each.vocabulary for each in found if each is not None] == [259, 3, 3, 3]
