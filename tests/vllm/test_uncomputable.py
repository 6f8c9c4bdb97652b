# SPDX-License-Identifier: Apache-2.0
"""Images that came to a decode engine without their content are never encoded there: that would end the engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import FETCH
from vllm import SamplingParams

from pd_connector.agent.commands import Hold
from pd_connector.config import Config
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

TOKENS = 100
IMAGE = SimpleNamespace(offset=10, length=40)
FETCHES = {**FETCH, "remote_request_id": "t"}
SIZES = {"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 8, 8]))}
WHOLE = {**SIZES, "pixel_values": SimpleNamespace(data=torch.rand(64, 588))}
SMALL = {**SIZES, "image_embeds": [torch.rand(2, 16)]}


def engine(**changes: Any) -> SchedulerSide:
    known: dict[str, Any] = {"produces": False, "consumes": True}
    return SchedulerSide(
        Config(overlap="off", defer_pages=False),
        EngineFacts(
            engine_id="e",
            windows=Windows([(16, 0)]),
            ranks=1,
            **known | changes,
        ),
    )


def request(data: dict[str, Any] | None, params: dict[str, Any] | None = FETCHES) -> Any:
    feature = SimpleNamespace(data=data, modality="image", identifier="its hash", mm_position=IMAGE)
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        prompt_token_ids=list(range(TOKENS)),
        prompt_embeds=None,
        cache_salt=None,
        lora_request=None,
        mm_features=[feature],
        num_prompt_tokens=TOKENS,
        num_computed_tokens=0,
        resumable=False,
        status=None,
        skip_reading_prefix_cache=False,
    )


def asked(side: SchedulerSide, of: Any, computed: int = 0) -> tuple[int | None, bool]:
    return side.get_num_new_matched_tokens(of, computed)


def allocated(side: SchedulerSide, of: Any, tokens: int) -> None:
    pages = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6, 7],))
    side.update_state_after_alloc(of, pages, tokens)


def test_it_is_fetched_and_not_computed_to_audit_its_producer() -> None:
    side, whole = engine(), request(WHOLE)
    side.on_new_request(whole)
    assert asked(side, whole) == (0, False), "the first of a producer is computed here"
    side, bare = engine(), request(SIZES)
    side.on_new_request(bare)
    assert any(isinstance(command, Hold) for command in side._commands)
    assert asked(side, bare) == (TOKENS - 1, True)


def test_after_its_load_has_failed_it_waits_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side, bare = engine(), request(SIZES)
    side.on_new_request(bare)
    asked(side, bare)
    allocated(side, bare, TOKENS - 1)
    side.load_ended("r", failed=True)
    for _ in range(3):
        assert asked(side, bare) == (None, False)
    assert [record.message for record in caplog.records if "without the content" in record.message]
    assert len(caplog.records) == 1
    end = IMAGE.offset + IMAGE.length
    assert asked(side, bare, end - 1) == (None, False)
    assert asked(side, bare, end) == (0, False), "another has brought its KV meanwhile"
    side.request_finished(bare, ([],))
    assert "r" not in side._fetching._uncomputable


@pytest.mark.parametrize(
    "params", [None, {"do_remote_prefill": True}, {**FETCHES, "remote_port": -1}]
)
def test_without_a_producer_it_waits(params: dict[str, Any] | None) -> None:
    side, bare = engine(), request(SIZES, params)
    side.on_new_request(bare)
    assert asked(side, bare) == (None, False)


@pytest.mark.parametrize("field", ["prompt_logprobs", "prompt_logprob_token_ids"])
@pytest.mark.parametrize("data", [SIZES, WHOLE])
def test_logprobs_of_its_prompt_do_not_make_the_engine_compute_it(
    data: dict[str, Any], field: str
) -> None:
    """For requests that read no cache, vLLM computes whatever a connector answers."""
    bare = data is SIZES
    params = SamplingParams(**{field: 1 if field == "prompt_logprobs" else [1]})
    side, one = engine(), request(data)
    one.sampling_params = params
    one.skip_reading_prefix_cache = params.skip_reading_prefix_cache
    assert one.skip_reading_prefix_cache
    side.on_new_request(one)
    assert one.skip_reading_prefix_cache is not bare
    # vLLM's worker would answer with memory that nobody has written.
    assert (getattr(one.sampling_params, field) is None) is bare
    assert getattr(params, field) is not None, "the client's own object"


@pytest.mark.parametrize("data", [WHOLE, SMALL, None, {**SIZES, "address": 3}])
def test_what_has_its_content_is_computed_where_it_is(data: dict[str, Any] | None) -> None:
    side, one = engine(), request(data, None)
    side.on_new_request(one)
    assert asked(side, one) == (0, False)


@pytest.mark.parametrize(
    "engines", [{"embeddings_come": True}, {"consumes": False, "produces": True}]
)
def test_engines_that_have_embeddings_or_take_no_such_requests(engines: dict[str, bool]) -> None:
    side, bare = engine(**engines), request(SIZES, None)
    side.on_new_request(bare)
    assert asked(side, bare) == (0, False)
