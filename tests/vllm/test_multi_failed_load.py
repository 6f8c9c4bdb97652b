# SPDX-License-Identifier: Apache-2.0
"""A load of PDConnector's fails, and another part of vLLM's MultiConnector has KV of the prompt, too."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import FETCH, PAGE
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from pd_bench.scheduler.bare import config_of, scheduler_of
from pd_connector.vllm.plugin import register

PAGES = 40
LONG, SHORT = 24 * PAGE, 4 * PAGE
"""The cache has room for each prompt, and not twice for the long one."""


class Offloaded(KVConnectorBase_V1, SupportsHMA):
    """Has all pages of every prompt but the last one, and never ends to load them."""

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        return max(0, (request.num_tokens - 1) // PAGE * PAGE - computed), True

    def update_state_after_alloc(self, *_: Any) -> None: ...
    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, *_: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    """The scheduler of a decode engine with both parts."""
    register()
    config = config_of(budget=LONG, seqs=4, max_model_len=1024, caching=False)
    ours = {"audit": "off"}
    parts = [
        {
            "kv_connector": "PDConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": ours,
        },
        {
            "kv_connector": "Offloaded",
            "kv_role": "kv_both",
            "kv_connector_module_path": __name__,
        },
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": parts},
    )
    grammars = SimpleNamespace(accept_tokens=lambda *_: True)
    made = scheduler_of(Scheduler, config, grammars, blocks=PAGES)
    yield made
    made.shutdown()


def fetch(scheduler: Scheduler, name: str, tokens: int) -> Request:
    """A request arrives, and a prefill engine has its KV."""
    params = {**FETCH, "remote_request_id": name}
    request = Request(
        request_id=name,
        prompt_token_ids=[len(name) + place % 250 for place in range(tokens)],
        sampling_params=SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
    )
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler, **reported: set[str]) -> dict[str, int]:
    """One step, whose workers report this; returns the tokens it computes of each request."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[1] for _ in names],
    )
    result.kv_connector_output = KVConnectorOutput(**reported)
    scheduler.update_from_output(output, result)
    return dict(output.num_scheduled_tokens)


def test_a_prompt_whose_load_failed_does_not_wait_for_room_for_twice_its_pages(
    scheduler: Scheduler,
) -> None:
    fetch(scheduler, "long", LONG)
    fetch(scheduler, "short", SHORT)
    step(scheduler, finished_recving={"long"}, failed_recving={"long"})
    computed = [step(scheduler, finished_recving={"short"})]
    computed += [step(scheduler) for _ in range(3)]
    assert any(each.get("long") == LONG for each in computed), "it is computed here"
    assert any("short" in each for each in computed), "what waited behind it runs"


def test_where_there_is_room_the_other_part_loads(scheduler: Scheduler) -> None:
    request = fetch(scheduler, "short", SHORT)
    step(scheduler, finished_recving={"short"}, failed_recving={"short"})
    assert step(scheduler) == {}, "the other part loads"
    assert not request.skip_reading_prefix_cache
    assert step(scheduler, finished_recving={"short"}) == {}
    assert step(scheduler) == {"short": PAGE}, "its last page"
