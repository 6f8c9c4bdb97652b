# SPDX-License-Identifier: Apache-2.0
"""The KV pool behind SGLang's own radix cache, of a model in which some layers have a sliding window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang_door.pool_engine import SLOTS, Make, hooked, make, prompt, store, stored
from support.waits import until

from pd_connector.config import CONFIG_VARIABLE
from pd_connector.errors import Cause, ConfigError
from pd_connector.pool.store.local import LocalStore
from pd_connector.sglang import pool_hooks
from pd_connector.sglang.pool_settings import check_kv_pool, check_linker

__all__ = ["hooked", "make", "store"]

WINDOW = 100


@pytest.mark.parametrize("tree", ["rust", "python"])
@pytest.mark.parametrize("window", [40, WINDOW, 300])
@pytest.mark.parametrize(("here", "there"), [(16, 16), (1, 64), (64, 1), (16, 128)])
def test_what_one_engine_computed_another_loads(
    make: Make, store: LocalStore, here: int, there: int, window: int, tree: str
) -> None:
    writer = make(page_size=here, tree=tree, window=window)
    reader = make(page_size=there, tree=tree, window=window)
    assert writer.ask(prompt(700)) == 0
    until(lambda: stored(store) == 5)
    assert reader.ask(prompt(700)) == 640


def test_ranks_share_out_what_they_save_and_load(make: Make, store: LocalStore) -> None:
    for number in (0, 1):
        half = make(rank=(number, 2), engine_id="w", page_size=64, window=WINDOW)
        half.compute(half.request(prompt(400)))
    until(lambda: stored(store) == 3)
    assert make(window=WINDOW).ask(prompt(400)) == 384


def test_only_what_the_cache_lacks_is_loaded(make: Make, store: LocalStore) -> None:
    """The cache ends within a chunk, and within the window of what is loaded."""
    writer, reader = make(window=300), make(write=False, window=300)
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    reader.compute(reader.request(prompt(200), read=False))
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.wait(req)
    slots = reader.load(req)
    assert len(slots) == 640
    reader.check(prompt(700), slots)


@pytest.mark.parametrize(
    ("gone", "page_size", "loaded"),
    [
        (0, 16, [256, 640]),
        (304, 16, [0, 640]),  # the window before token 256 is gone, that before 640 is not
        (528, 16, [0, 640]),
        (528, 64, [0, 0]),  # the first of its pages begins before token 528
        (560, 16, [0, 0]),
    ],
)
def test_only_lengths_are_named_whose_window_was_saved(
    make: Make, store: LocalStore, gone: int, page_size: int, loaded: list[int]
) -> None:
    """SGLang has freed windows before the prompt was saved; the rest of the chunks is there."""
    writer = make(window=WINDOW)
    writer.compute(writer.request(prompt(700)), windows_from=gone)
    until(lambda: stored(store) == 5)
    found = []
    for length in (300, 699):
        reader = make(page_size=page_size, window=WINDOW, write=False)
        found.append(reader.ask([*prompt(700)[:length], 9]))
    assert found == loaded


def test_a_chunk_across_nodes_is_saved_with_its_window(make: Make, store: LocalStore) -> None:
    """As in a conversation: SGLang's cache has the first part of a chunk in one node, and the rest in the next."""
    writer = make(window=300, page_size=16)
    for length in (200, 330, 700):
        req = writer.request(prompt(700)[:length], read=False)
        slots = writer.load(req)
        writer.compute(req, slots)
    until(lambda: stored(store) == 5)
    assert writer.tree.swa_protected_size() == 0, "nothing is locked"
    assert make(window=300, page_size=64).ask(prompt(700)) == 640


def test_windows_that_can_be_freed_are_not_saved(make: Make, store: LocalStore) -> None:
    """SGLang's lock of a node keeps its window. What lies before can be freed while it is copied."""
    engine = make(window=40, page_size=16)
    engine.compute(engine.request(prompt(200)))
    tables: list[list[list[int]]] = []
    found = engine.linker._tables

    def seen(*args: Any) -> list[list[int]]:
        tables.append(found(*args))
        return tables[-1]

    engine.linker._tables = seen  # type: ignore[method-assign]
    req = engine.request(prompt(700), read=False)
    engine.compute(req, engine.load(req))
    full, windowed = tables[-1]
    assert min(full) > 0
    kept = (192 - 48) // 16  # the node before ends at token 192
    assert [page < 0 for page in windowed] == [True] * kept + [False] * (len(full) - kept)


@pytest.mark.parametrize(("window", "loaded"), [(0, 256), (WINDOW, 0)])
def test_a_decode_engine_saves_no_window_that_was_handed_over(
    make: Make, store: LocalStore, window: int, loaded: int
) -> None:
    """A handoff has no token before the window of the prompt's end, and fills the window's first page only in part."""
    decode = make(consumes=True, page_size=16, window=window)
    decode.compute(decode.request(prompt(300)))
    until(lambda: stored(store) == 2)
    assert make(window=window, write=False).ask(prompt(300)) == loaded


def test_the_window_that_a_chunk_begins_in_is_kept_until_it_is_saved(make: Make) -> None:
    """SGLang's own lock of the node would not keep it."""
    engine = make(window=40, page_size=16)
    engine.compute(engine.request(prompt(200)))
    req = engine.request(prompt(700), read=False)
    slots = engine.load(req)
    settle, engine.settle = engine.settle, lambda: None  # type: ignore[method-assign]
    engine.compute(req, slots)
    begins = slots[192 - 48 : 192]  # the chunk begins at token 128, its node at token 192

    def held() -> list[bool]:
        engine.tree.evict(EvictParams(swa_num_tokens=SLOTS))
        return (engine.allocator.translate_swa_indices_for_transfer(begins) > 0).tolist()

    assert all(held())
    settle()
    assert not any(held()), "control"


def test_what_is_locked_for_a_save_is_free_after_a_flush(make: Make) -> None:
    engine = make(window=300, page_size=16)
    req = engine.request(prompt(200))
    engine.compute(req)
    req = engine.request(prompt(700), read=False)
    slots = engine.load(req)
    engine.settle = lambda: None  # type: ignore[method-assign]
    engine.compute(req, slots)
    assert engine.tree.swa_protected_size() > 0, "control"
    engine.flush()
    assert engine.tree.swa_protected_size() == 0
    assert not engine.linker._offloads


@pytest.mark.parametrize("wrong", [False, True])
def test_windows_are_compared_before_a_writer_is_believed(
    make: Make, store: LocalStore, wrong: bool
) -> None:
    writer = make(engine_id="w", window=WINDOW, error=0.2 if wrong else 0.0)
    reader = make(engine_id="r", audit="first", window=WINDOW, page_size=64)
    for seed in (1, 2):
        writer.compute(writer.request(prompt(300, seed)))
    until(lambda: stored(store) == 4)
    assert reader.ask(prompt(300, 1)) == 0
    counts = reader.rank.telemetry.take()
    assert counts is not None
    assert counts.counts["audits", (("cause", Cause.AUDIT if wrong else "passed"),)] >= 1
    assert reader.ask(prompt(300, 2)) == (0 if wrong else 256)


def test_after_a_flush_it_loads_what_it_has_saved_itself(make: Make, store: LocalStore) -> None:
    engine = make(window=WINDOW)
    engine.ask(prompt(400))
    until(lambda: stored(store) == 3)
    engine.flush()
    assert engine.ask(prompt(400)) == 384


def test_what_is_loaded_can_be_gone_on_from_at_any_page(make: Make, store: LocalStore) -> None:
    """Later requests that share a part of a loaded prompt find right windows in SGLang's cache, or none."""
    make(window=WINDOW).ask(prompt(700))
    until(lambda: stored(store) == 5)
    reader = make(window=WINDOW, page_size=64, write=False)
    reader.ask(prompt(700))
    found = set()
    for length in range(64, 704, 64):
        req = reader.request([*prompt(700)[:length], 9], read=False)
        slots = reader.load(req)
        reader.check(prompt(700), slots)
        found.add(len(slots))
    assert 640 in found


def test_sglang_keeps_windows_until_they_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    frees = envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS
    monkeypatch.setenv(frees.name, "")  # so that its absence is what is restored
    for config, given, mode, wanted in (
        ("", None, "null", True),
        ('{"pool": true}', None, "null", False),
        ('{"pool": true}', None, "prefill", False),
        ('{"pool": true}', None, "decode", True),
        ('{"pool": true}', "1", "null", True),
    ):
        monkeypatch.setenv(CONFIG_VARIABLE, config)
        monkeypatch.delenv(frees.name, raising=False)
        if given is not None:
            monkeypatch.setenv(frees.name, given)
        backend = {} if mode == "null" else {"disaggregation_transfer_backend": "pd_connector"}
        radix = {"disaggregation_decode_enable_radix_cache": True} if mode == "decode" else {}
        args = ServerArgs(model_path="dummy", disaggregation_mode=mode, **backend, **radix)
        pool_hooks.resolved(lambda server_args: None, args)
        assert frees.get() == wanted
    monkeypatch.delenv(frees.name, raising=False)


def test_caches_of_other_windows_are_refused_by_name() -> None:
    both = {ComponentType.FULL, ComponentType.SWA}
    check_linker(SimpleNamespace(), SimpleNamespace(page_size=64), both)  # control
    plain = SimpleNamespace(swa_req_ring=False)
    windows = SimpleNamespace(full_layer_nums=2, full_kv_pool=None)
    check_kv_pool(windows, plain)  # control
    for pool, allocator, named in (
        (SimpleNamespace(full_layer_nums=0), plain, "--disable-hybrid-swa-memory"),
        (windows, SimpleNamespace(swa_req_ring=True), "in a ring"),
        (SimpleNamespace(full_kv_pool=SimpleNamespace(use_dsa=True)), plain, "sparse attention"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_kv_pool(pool, allocator)
