# SPDX-License-Identifier: Apache-2.0
"""The ranks of an engine find each other when it starts: pipelines, tensor parallelism and replicas."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang_door.test_sglang_cache import HEADS, LAYERS, full_attention
from support.agents import until

from pd_connector.agent.consuming.discovery import ask_ranks
from pd_connector.config import CONFIG_VARIABLE
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded
from pd_connector.sglang import manager as manager_module
from pd_connector.sglang import registry
from pd_connector.sglang.manager import Manager
from pd_connector.sglang.prefill_engines import look_up_often
from pd_connector.sglang.support import _WANTED

ROLES = {"prefill": DisaggregationMode.PREFILL, "decode": DisaggregationMode.DECODE}


class World:
    """Ranks, each in a thread, that tell each other what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._told: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def rank(self, place: int) -> Any:
        def gather(obj: Any) -> list[Any]:
            self._told[place] = obj
            self._barrier.wait()
            found = list(self._told)
            self._barrier.wait()
            return found

        return SimpleNamespace(world_size=self.size, rank_in_group=place, all_gather_object=gather)


def parallel(world: Any, **changes: Any) -> Any:
    known = {
        "world_group": world,
        "attn_tp_rank": 0,
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "attn_dp_rank": 0,
        "attn_dp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "dp_size": 1,
        "dp_rank": None,
        "load_balance_method": "follow_bootstrap_room",
    }
    return SimpleNamespace(**known | changes)


Start = Callable[..., list[Manager]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine; each rank is given by its pool and its place in SGLang's terms."""
    own = threading.local()
    started: list[Manager] = []
    monkeypatch.setenv(CONFIG_VARIABLE, '{"overlap": "step", "transports": ["tcp"]}')
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: own.parallel)
    monkeypatch.setattr(manager_module, "register", lambda *args: None)
    monkeypatch.setattr(manager_module, "kv_scales", lambda scheduler: {})
    monkeypatch.setattr(manager_module, "loaded_files", lambda *_: None)
    monkeypatch.setattr(manager_module, "loaded_weights", lambda *_: Loaded())
    monkeypatch.setattr(
        manager_module,
        "model_facts",
        lambda *args: ModelFacts(b"c", b"w"),
    )

    def begin(role: str, pool: Any, place: Any) -> Manager:
        own.parallel = place
        args = SimpleNamespace(state_types=[], num_draft_entries=0)
        server_args = SimpleNamespace(
            **_WANTED,
            disaggregation_mode=role,
            enable_metrics=False,
            disaggregation_decode_enable_radix_cache=False,
        )
        made = Manager(args, ROLES[role], server_args)
        scheduler = SimpleNamespace(
            sliding_window_size=None,
            req_to_token_pool=SimpleNamespace(req_to_token=None),
            model_config=SimpleNamespace(vocab_size=259),
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(lora_manager=None, model=torch.nn.Module())
            ),
        )
        buffers = MetadataBuffers(4, 16, torch.float32, 0)
        queue = SimpleNamespace(
            max_total_num_tokens=4096,
            num_reserved_decode_tokens=512,
            token_to_kv_pool=pool,
            scheduler=scheduler,
            metadata_buffers=buffers,
        )
        made.attach(queue)
        started.append(made)
        return made

    def run(role: str, *ranks: tuple[Any, Any]) -> list[Manager]:
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: begin(role, *rank), ranks))

    yield run
    for made in started:
        made.weights.close()
        made.agent.close()


def known(manager: Manager) -> list[Shard]:
    """What its ranks hold, as any of them tells a decode engine."""
    found = ask_ranks(manager._config, "127.0.0.1", manager.agent.port, time.monotonic() + 30)
    return sorted((peer.shard for peer in found), key=lambda shard: shard.first_layer)


def test_a_decode_engine_starts(start: Start) -> None:
    """It listens nowhere: nobody asks it for its ranks."""
    (manager,) = start("decode", (full_attention(16), parallel(World(1).rank(0))))
    rank = manager.rank
    assert not rank.produces
    assert rank.pages.limit > 1
    rank.admission.enter(5)
    assert rank.admission.room_problem(SimpleNamespace(bootstrap_room=5))
    manager.idle()


def test_stages_of_a_pipeline_are_one_engine_that_shares_out_its_layers(start: Start) -> None:
    world = World(2)
    ranks = start(
        "prefill",
        *(
            (full_attention(16, start_layer=LAYERS * n), parallel(world.rank(n), pp_size=2))
            for n in range(2)
        ),
    )
    shards = [Shard(0, LAYERS, 0, 1), Shard(LAYERS, 2 * LAYERS, 0, 1)]
    assert [known(rank) for rank in ranks] == [shards, shards]
    for manager in ranks:  # they are not in step, so neither says that the other's room is in use
        manager.rank.admission.enter(5)
        assert not manager.rank.admission.room_problem(SimpleNamespace(bootstrap_room=5))


def test_replicas_of_attention_are_engines_of_their_own(start: Start) -> None:
    """Each has all heads, and requests of its own."""
    world = World(4)
    ranks = start(
        "prefill",
        *(
            (
                full_attention(16, HEADS // 2),
                parallel(
                    world.rank(n),
                    attn_dp_rank=n // 2,
                    attn_dp_size=2,
                    dp_size=2,
                    attn_tp_rank=n % 2,
                    attn_tp_size=2,
                ),
            )
            for n in range(4)
        ),
    )
    halves = [Shard(0, LAYERS, 0, 2), Shard(0, LAYERS, 1, 2)]
    for rank in ranks:
        assert sorted(known(rank), key=lambda shard: shard.tp_rank) == halves
    ports = [{peer.source.port for peer in rank.agent._ranks} for rank in ranks]
    assert ports[0] == ports[1]
    assert ports[2] == ports[3]
    assert not ports[0] & ports[2]


@pytest.mark.parametrize(
    ("changes", "kv_args", "row", "number"),
    [
        ({}, {}, {"pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "attn_dp_size": 1}, 0),
        ({"pp_size": 2}, {"pp_rank": 1}, {"pp_size": 2, "pp_rank": 1}, 1),
        (
            {"attn_dp_size": 2, "attn_dp_rank": 1, "dp_size": 2},
            {},
            {"attn_dp_size": 2, "attn_dp_rank": 1, "system_dp_size": 1},
            1,
        ),
        (
            {"dp_size": 2, "dp_rank": 1},
            {"system_dp_rank": 1},
            {"attn_dp_size": 1, "system_dp_size": 2, "system_dp_rank": 1},
            1,
        ),
    ],
)
def test_the_registry_is_told_where_in_its_engine_a_rank_is(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    kv_args: dict[str, Any],
    row: dict[str, Any],
    number: int,
) -> None:
    """It answers nobody before as many rows have come as there are ranks."""
    one_world = (
        "dp_rank" in changes
    )  # the others' ranks are of another world, with places of its own
    world = SimpleNamespace(
        world_size=1 if one_world else 2, rank_in_group=0 if one_world else number
    )
    place = parallel(world, **changes)
    serving = SimpleNamespace(port=1)
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: place)
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: disagg)
    args = {"pp_rank": 0, "system_dp_rank": 0, "page_size": 16, "kv_cache_dtype_str": "bfloat16"}
    found = registry._row(SimpleNamespace(**args | kv_args), "h", 5)
    assert found == {**found, **row}
    assert registry.global_rank(place) == number


def test_a_rank_registers_once_the_registry_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through a proxy of the environment, and not where a redirect points to."""
    taken, answers = list[tuple[str, bytes]](), [503, 302, 200]

    class Registry(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0))
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    monkeypatch.setattr(registry, "_RETRY_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        registry._put("127.0.0.1", server.server_port, b"row")
        server.shutdown()
    assert taken == [("/route", b"row")] * 3


def test_a_prefill_engine_is_known_as_soon_as_it_has_answered() -> None:
    """SGLang itself would ask 15 times, once a second, and then end the request."""
    queue, asked = object.__new__(DecodePreallocQueue), list[str]()
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    queue._max_ensure_retries, queue._ensure_retry_interval = 15, 1.0
    queue.kv_manager = SimpleNamespace(
        try_ensure_parallel_info=lambda address: asked.append(address) or len(asked) > 20
    )
    waiting = SimpleNamespace(kv_receiver=SimpleNamespace(abort=lambda: pytest.fail("given up")))
    look_up_often(queue)
    until(lambda: queue._ensure_prefill_info({"p": [waiting]})[0], "known")
    assert len(asked) == 21
