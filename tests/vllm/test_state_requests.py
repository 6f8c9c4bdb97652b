# SPDX-License-Identifier: Apache-2.0
"""Requests of a model with recurrent states: what a prefill engine computes and offers, what a decode engine asks for,
and where states are compared. With vLLM's own scheduler."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import OFFER, PAGE, SteppedEngine
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from pd_connector.errors import Cause, ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.messages import AuditReport, WorkerActivity
from pd_connector.vllm.pages.held_states import HeldStates

FULL = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)


LONGEST = 2048


def engine_of(
    mode: str = "align", role: str = "kv_both", scratch: int = 0, **extra: object
) -> SteppedEngine:
    states = MambaSpec(
        block_size=PAGE if mode == "align" else LONGEST,
        shapes=((2, 4),),
        dtypes=(torch.float32,),
        page_size_padded=FULL.page_size_bytes,
        mamba_cache_mode=mode,
        num_speculative_blocks=scratch,
    )
    engine = SteppedEngine(
        role, specs=[FULL, states], states=mode, caching=mode == "align", **extra
    )
    engine.side.set_peers((Peer(Source("127.0.0.1", 7, "producer"), Shard(0, 2, 0, 1)),))
    return engine


def told(engine: SteppedEngine, kind: type) -> list:
    return [command for command in engine.commands if isinstance(command, kind)]


def offers(engine: SteppedEngine) -> list[Offer]:
    """All offers, up to the final one."""
    while not (found := told(engine, Offer)) or not found[-1].final:
        engine.step()
    return found


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("tokens", [150, 2 * PAGE + 1, 2 * PAGE + 2])
def test_a_prompt_is_computed_and_offered_without_its_last_token(mode: str, tokens: int) -> None:
    engine = engine_of(mode)
    request = engine.add("a", tokens, 8, **OFFER)
    last = tokens - 1
    assert (request.num_prompt_tokens, len(request.prompt_token_ids)) == (last, last)
    *streamed, final = offers(engine)
    tables = engine.pages("a")  # kept for the consumer
    assert (final.final, final.tokens, final.state_token) == (True, last, last)
    assert request.num_output_tokens == 1, "it stops after the prompt"
    assert final.final_token is None, "what was sampled is no answer"
    if mode == "align":
        before = (last - 1) // PAGE
        assert final.boundary_token == before * PAGE
        assert tables[1][before - 1] == 0, "vLLM has given it up"
        pages = [tables[1][before], final.pages[1][1]]
        blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
        assert blocks[pages[1]].ref_cnt == 1
        assert blocks[pages[1]].block_hash is not None, "it is also found in the prefix cache"
    else:
        assert final.boundary_token == 0
        pages = [tables[1][0]]
    assert [list(table) for table in final.pages] == [tables[0][: -(-last // PAGE)], pages]
    assert all(page > 0 for page in pages)
    for offer in streamed:
        assert offer.pages[1] == [], "a state that goes on is not offered"
        assert offer.state_token == last, "and said where it will stand"
    engine.step(finished_sending={"a"})
    engine.step()
    engine.assert_nothing_held()


@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_decode_engine_that_goes_on_from_the_first_token_gets_the_whole_prompt(mode: str) -> None:
    """SGLang's: the state stands after all tokens, and the token that follows is the answer's first."""
    engine = engine_of(mode)
    request = engine.add("a", 2 * PAGE + 1, 8, **OFFER, from_first_token=True)
    final = offers(engine)[-1]
    assert request.num_prompt_tokens == final.tokens == final.state_token == 2 * PAGE + 1
    assert request.num_output_tokens == 1, "a state that goes on stands for other tokens"
    assert final.final_token is not None
    assert final.final_token.first_token == request.output_token_ids[0]
    place = 2 if mode == "align" else 0
    assert final.pages[1][0] == engine.pages("a")[1][place]


def test_scratch_pages_of_speculation_are_no_states() -> None:
    engine = engine_of(scratch=2)
    engine.add("a", 40, 8, **OFFER)
    final = offers(engine)[-1]
    tables = engine.pages("a")
    assert final.pages[1][0] == tables[1][2]
    assert final.pages[1][1] not in (-1, *tables[1])
    assert len(tables[1]) == 5


def test_a_prompt_of_one_token_stays() -> None:
    engine = engine_of()
    assert engine.add("a", 1, **OFFER).num_prompt_tokens == 1


def test_logprobs_of_a_prompt_without_its_last_token_are_not_asked_for() -> None:
    engine = engine_of()
    request = engine.add("a", 40, **OFFER)
    whole = engine.add("b", 40)
    whole.sampling_params = SamplingParams(max_tokens=8, prompt_logprobs=1)
    whole.max_tokens = 8
    whole.kv_transfer_params = dict(OFFER)
    engine.side.on_new_request(whole)
    assert whole.num_prompt_tokens == 40
    assert whole.max_tokens == 8, "it is answered as if it had no parameters"
    assert request.num_prompt_tokens == 39
    assert not engine.side.offers._transfers.keys() - {"a"}


def test_other_models_keep_their_prompts() -> None:
    """The control."""
    engine = SteppedEngine()
    assert engine.add("a", 150, 8, **OFFER).num_prompt_tokens == 150


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("said", [{"remote_num_tokens": 149}, {}])
def test_a_decode_engine_asks_for_the_state_before_the_last_token(
    mode: str, said: dict[str, int]
) -> None:
    engine = engine_of(mode, audit="off")
    engine.fetch("a", 150, **said)
    engine.step()
    (load,) = told(engine, Load)
    assert (load.first_token, load.stop_token, load.state_token) == (0, 149, 149)
    tables = engine.pages("a")
    page = tables[1][148 // PAGE if mode == "align" else 0]
    assert list(load.pages[1]) == [page]
    assert page > 0


def test_both_sides_hash_the_same_tokens() -> None:
    """A router that tells both at once gives neither the number of tokens."""
    offering, fetching = engine_of(), engine_of(audit="off")
    offering.add("a", 150, **OFFER)
    fetching.fetch("a", 150)
    while not told(offering, Offer):
        offering.step()
    fetching.step()
    (load,) = told(fetching, Load)
    assert load.identity == told(offering, Offer)[0].identity


@pytest.mark.parametrize("tokens", [150, 2 * PAGE + 1])
def test_states_are_compared_where_both_sides_keep_one(tokens: int) -> None:
    engine = engine_of()
    request = engine.fetch("a", tokens, 3)
    boundary = (tokens - 1) // PAGE * PAGE
    page = None
    while not told(engine, Load):
        engine.step()
        if request.num_computed_tokens >= boundary and page is None:
            page = engine.pages("a")[1][boundary // PAGE - 1]
    (load,) = told(engine, Load)
    assert load.compares
    assert (load.stop_token, load.state_token) == (tokens - 1, boundary)
    assert list(load.pages[1]) == [page]
    block = engine.scheduler.kv_cache_manager.block_pool.blocks[page]
    while engine.scheduler.running:
        engine.step()
        assert block.ref_cnt, "nobody gets the page meanwhile"
    engine.step(WorkerActivity(audits=(AuditReport("a", None, (), ""),)))
    while engine.scheduler.requests:
        engine.step()
    engine.assert_nothing_held()


@pytest.mark.parametrize("drafts", ["eagle", "ngram"])
@pytest.mark.parametrize("tokens", [150, 9 * PAGE + 1, 9 * PAGE + 2, 10 * PAGE - 1])
def test_states_of_a_model_that_drafts_are_compared_where_vllm_ends_a_step(
    drafts: str, tokens: int
) -> None:
    """With drafts from hidden states vLLM does not reuse a prompt's last page, and ends its last aligned step a page
    earlier. The step could compute the whole prompt."""
    more = {"budget": 1024, "drafts": drafts, "scratch": 1}
    engine, producer = engine_of(**more), engine_of(**more)
    engine.fetch("a", tokens, 3)
    while engine.scheduler.requests and not told(engine, Load):
        engine.step()
    (load,) = told(engine, Load)
    wanted = tokens // PAGE * PAGE - PAGE if drafts == "eagle" else (tokens - 1) // PAGE * PAGE
    assert (load.compares, load.state_token) == (True, wanted)
    _assert_holds(engine, load.pages[1][0], wanted)
    producer.add("a", tokens, 8, **OFFER)
    final = offers(producer)[-1]
    assert wanted in (final.state_token, final.boundary_token)
    assert final.boundary_token > 0
    _assert_holds(producer, final.pages[1][1], final.boundary_token)


def _assert_holds(engine: SteppedEngine, page: int, position: int) -> None:
    """vLLM's own record of the page."""
    block = engine.scheduler.kv_cache_manager.block_pool.blocks[page]
    assert block.block_hash_num_tokens == position


def test_a_prompt_whose_states_are_kept_elsewhere_by_its_producer_is_not_audited() -> None:
    """A prompt of whole pages is a page shorter for the producer, which leaves its last token."""
    engine = engine_of(budget=1024, drafts="eagle", scratch=1)
    engine.fetch("a", 9 * PAGE, 3)
    while engine.scheduler.requests:
        engine.step()
    assert not told(engine, Load)
    engine.fetch("b", 9 * PAGE + 1, 3, seed=1)  # the control
    while engine.scheduler.requests and not told(engine, Load):
        engine.step()
    assert told(engine, Load)


def test_a_page_that_holds_another_position_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM may keep the state of an earlier position in a page, than its place in the table says."""
    engine = engine_of(budget=1024)
    hold = HeldStates.hold
    moved: list[int] = []

    def moving(held: HeldStates, request_id: str, position: int) -> bool:
        for page in engine.scheduler.kv_cache_manager.get_blocks(request_id).blocks[1]:
            if page.block_hash_num_tokens == position:
                page._block_hash_num_tokens = position - 1
                moved.append(page.block_id)
        return hold(held, request_id, position)

    monkeypatch.setattr(HeldStates, "hold", moving)
    engine.fetch("a", 150, 3)
    while engine.scheduler.requests:
        engine.step()
    assert moved
    assert not told(engine, Load)
    assert audited(engine, "bb").state_token == 0, (
        "nor is any other state of this pair: KV alone is"
    )


def test_a_prompt_shorter_than_a_page_has_no_state_to_compare() -> None:
    """With `mamba_cache_mode` none no prompt has, and KV alone is compared."""
    engine = engine_of()
    engine.fetch("a", PAGE, 3)
    while engine.scheduler.requests:
        engine.step()
    assert not told(engine, Load)
    engine = engine_of("none")
    engine.fetch("a", 60, 3)
    while not told(engine, Load):
        engine.step()
    (load,) = told(engine, Load)
    assert (load.compares, load.state_token) == (True, 0)


def test_the_log_says_once_how_long_the_first_prompt_must_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of()
    with caplog.at_level("INFO", "pd_connector.vllm"):
        for number in range(2):
            engine.fetch(f"a{number}", PAGE, 3, seed=number)
            while engine.scheduler.requests:
                engine.step()
        (line,) = [line for line in caplog.messages if "are computed here until" in line]
        assert "at least 33 tokens" in line
        audited(engine, "bb", 33)
        engine.fetch("c", PAGE, 3)
        engine.step()
    assert caplog.text.count("are computed here until") == 1, "not of one that has passed"


NO_STATE = "states stand after 148 tokens, wanted after 144"


def audited(engine: SteppedEngine, name: str, tokens: int = 150, **reports: object) -> Load:
    """A request is audited, and its comparison ends so."""
    engine.commands.clear()
    engine.fetch(name, tokens, 3, seed=len(name))
    while engine.scheduler.requests and not told(engine, Load):
        engine.step()
    cause = reports.get("cause")
    report = AuditReport(name, cause, (), str(reports.get("detail", "")))
    engine.step(WorkerActivity(audits=(report,)))
    while engine.scheduler.requests:
        engine.step()
    (load,) = told(engine, Load)
    assert load.compares
    return load


def test_a_producer_without_a_prefix_cache_is_audited_by_its_kv_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps no state after whole pages, so there is none to compare."""
    producer, engine = engine_of("none"), engine_of()
    producer.add("p", 150, 8, **OFFER)
    offered = offers(producer)[-1]
    with caplog.at_level("INFO", "pd_connector.vllm"):
        load = audited(engine, "a", cause=Cause.TOKENS, detail=NO_STATE)
    assert load.state_token not in (offered.state_token, offered.boundary_token)
    assert f"audits of engine producer compare its KV without its states: {NO_STATE}" in caplog.text
    load = audited(engine, "bb", 40)
    assert load.state_token == 0, "the producer is asked for no state"
    engine.commands.clear()
    engine.fetch("ccc", 150, 3, seed=77)
    engine.step()
    (load,) = told(engine, Load)
    assert (load.compares, load.state_token) == (False, 149), "it is trusted"


@pytest.mark.parametrize("cause", [Cause.STALLED, Cause.AUDIT])
def test_states_go_on_to_be_compared_after_other_failures(
    cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    monkeypatch.setattr(engine.side._fetching.audits, "_retry_s", 0.0)
    audited(engine, "a", cause=cause)
    assert audited(engine, "bb").state_token == 144


def test_a_producer_that_has_restarted_is_asked_for_states_again() -> None:
    engine = engine_of()
    load = audited(engine, "a", cause=Cause.TOKENS, detail=NO_STATE)
    audits = engine.side._fetching.audits
    audits.refused((tuple(peer.source for peer in load.peers), ""))
    assert audited(engine, "bb").state_token == 144


def test_there_is_no_pool_for_them(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="pool: this model keeps recurrent states"):
        engine_of(pool={"dir": str(tmp_path)})
