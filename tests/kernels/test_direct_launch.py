# SPDX-License-Identifier: Apache-2.0
"""Launches like one before (`Tuning.direct_launch`): the kernel, interpreted, launched as Triton
found it and by position, with everything around it as on a GPU."""

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import decode_interpreted  # before what it imports
import pytest
import torch
from decode_batches import FP8, error, mla_batch, paged_batch
from triton import knobs

from pd_kernels.attention import (
    decode_plan,
    document,
    mla_decode,
    mla_kernel,
    paged,
    paged_decode,
    paged_kernel,
    plan_mla_decode,
    plan_paged_decode,
    soft_cap,
)
from pd_kernels.attention import direct as direct_module
from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.tuning import Tuning, tuned

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
HERE = -1
"""Number of the device of tensors on a CPU."""
STREAM = 7


class Found:
    """Stands for a function of Triton's, and for what it compiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.searched, self.direct = 0, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def search(**given: Any) -> Any:
            self.searched += 1
            self.kernel[grid](**given)
            return Compiled(self)

        return search

    @property
    def counts(self) -> tuple[int, int]:
        return self.searched, self.direct


class Compiled:
    """Stands for a compiled kernel, which takes all arguments by position."""

    function, packed_metadata = "its function", "its metadata"

    def __init__(self, found: Found) -> None:
        self.found = found

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            told.append("Triton's way")
            self._run(grid, *arguments)

        return run

    def run(self, x: int, y: int, z: int, stream: int, *others: Any) -> None:
        """Triton's launcher."""
        assert (stream, *others[:5]) == (
            STREAM,
            self.function,
            self.packed_metadata,
            None,
            None,
            None,
        )
        self._run((x, y, z), *others[5:])

    def _run(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        assert len(arguments) == len(self.found.arg_names)
        self.found.direct += 1
        self.found.kernel[grid](*arguments)


told: list[str] = []
"""Launches of which a profiler is told."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DecodeCall, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    active = SimpleNamespace(get_current_device=lambda: HERE, get_current_stream=lambda _: STREAM)
    monkeypatch.setattr(direct_module, "driver", SimpleNamespace(active=active))
    with decode_interpreted.dots_mended(), tuned(direct_launch=True):
        yield


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    kernel = Found(paged_kernel.paged_attention)
    monkeypatch.setattr(paged_kernel, "paged_attention", kernel)
    return kernel


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> Found:
    kernel = Found(mla_kernel.latent_attention)
    monkeypatch.setattr(mla_kernel, "latent_attention", kernel)
    return kernel


def tensors(batch: PagedCall) -> tuple[torch.Tensor, ...]:
    return batch.query, batch.keys, batch.values, batch.table, batch.lengths


def usual(batch: PagedCall, **others: Any) -> Any:
    with tuned(direct_launch=False):
        return paged_decode(*tensors(batch), **others)


@pytest.mark.parametrize(("cache", "by_head"), [(torch.bfloat16, False), (FP8, False), (FP8, True)])
def test_layers_after_the_first_are_launched_as_it_was(
    found: Found, cache: torch.dtype, by_head: bool
) -> None:
    """With their own queries, caches, scales and results."""
    layers = [paged_batch([90, 5], cache=cache, seed=seed) for seed in (1, 1, 1)]
    for number, layer in enumerate(layers):
        layer.query.mul_(1 + number)
        layer.values.copy_((layer.values.float() * 0.5**number).to(cache))
    plan = plan_paged_decode(layers[0].query, layers[0].keys).fill(layers[0].lengths)
    for number, layer in enumerate(layers):
        scales: dict[str, Any] = {"scale": 0.1 + number, "k_scale": 0.7, "v_scale": 1 + number}
        if by_head:
            scales["k_scale"] = torch.tensor([0.7, 0.3 + number])
            scales["v_scale"] = torch.tensor([0.5 + number, 1.0])
        out = torch.full_like(layer.query, 7.0)
        assert paged_decode(*tensors(layer), **scales, out=out, plan=plan) is out
        assert torch.equal(out, usual(layer, **scales))
    assert found.direct == 2


def test_latents_are_too(latent: Found) -> None:
    layers = [mla_batch([90, 5], seed=seed, coded=True) for seed in (1, 1)]
    plan = plan_mla_decode(layers[0].query, layers[0].cache).fill(layers[0].lengths)
    for number, layer in enumerate(layers):
        layer.query.mul_(1 + number)
        given = layer.query[:, 0], layer.cache, layer.table, layer.lengths
        asked = {"scale": 0.05, "return_lse": True, "plan": plan}
        out, lse = mla_decode(*given, **asked)
        with tuned(direct_launch=False):
            wanted, sums = mla_decode(*given, **asked)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, sums)
    assert latent.direct == 1


def test_plans_after_the_first_are_launched_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """For other lengths, fewer of them, and from other memory; other alignments and dtypes take another kernel."""
    kernel = Found(decode_plan.partition_rows)
    monkeypatch.setattr(decode_plan, "partition_rows", kernel)
    batch = paged_batch([90, 40, 7])
    plan = plan_paged_decode(batch.query, batch.keys, max_batch=9)
    room = torch.tensor([300, 40, 0, 5, 60, 7, 100, 2, 9], dtype=torch.int32)
    apart = room.clone()
    moved = torch.empty(10, dtype=torch.int32)[1:].copy_(room)
    for number, (lengths, counts) in enumerate(
        [
            *((room, (1, 0)), (room[:2], (1, 1)), (apart, (1, 2)), (room[4:], (1, 3))),
            *((moved, (2, 3)), (room.long(), (3, 3)), (moved[:5], (3, 4))),
        ]
    ):
        decode_plan.launch_plan(plan, lengths)
        assert torch.equal(plan.ranges, plan.defined(lengths)), number
        assert kernel.counts == counts, number
    with tuned(direct_launch=False):
        decode_plan.launch_plan(plan, room)
    assert kernel.counts == (4, 4)


def test_a_plan_that_is_filled_anew_and_other_pages_count(found: Found) -> None:
    batch = paged_batch([90, 40])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    paged_decode(*tensors(batch), plan=plan)
    batch.lengths.copy_(torch.tensor([33, 7]))
    out = paged_decode(*tensors(batch), plan=plan.fill(batch.lengths))
    assert found.counts == (1, 1)
    assert torch.equal(out, usual(batch))


def test_what_another_kernel_is_compiled_for_takes_the_usual_way(found: Found) -> None:
    """Other shapes, strides, dtypes and alignments, another device, other questions."""
    batch = paged_batch([90, 40, 3])
    given = tensors(batch)
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    wide = torch.zeros(3, 1, 4, 96, dtype=batch.query.dtype)
    moved = torch.zeros(batch.query.numel() + 1, dtype=batch.query.dtype)[1:]
    fewer = (batch.query[:2], *given[1:3], batch.table[:2], batch.lengths[:2])
    asked: list[Callable[[], Any]] = [
        lambda: paged_decode(*given, plan=plan),
        lambda: paged_decode(wide[..., :64], *given[1:], plan=plan),
        lambda: paged_decode(moved.view_as(batch.query), *given[1:], plan=plan),
        lambda: paged_decode(batch.query[:, 0], *given[1:], plan=plan),
        lambda: paged_decode(*given[:4], batch.lengths.long(), plan=plan),
        lambda: paged_decode(*given, plan=plan, return_lse=True),
        lambda: paged_decode(*given, plan=plan, return_partials=True),
        lambda: paged_decode(*given, plan=plan, causal=False),
        lambda: paged_decode(*given, plan=plan, score_mod=CAP),
        lambda: paged_decode(*fewer, plan=plan.fill(fewer[-1])),
    ]
    for number, ask in enumerate(asked):
        ask()
        assert found.counts == (number + 1, number)
        ask()
        assert found.counts == (number + 1, number + 1)


CAP = soft_cap(30.0)


def test_calls_without_a_plan_masks_and_jagged_batches_take_the_usual_way(found: Found) -> None:
    batch = paged_batch([90, 40])
    mask = document(torch.zeros(2, 128, dtype=torch.int32))
    masked = plan_paged_decode(batch.query, batch.keys, mask_mod=mask, max_tokens=128)
    masked.fill(batch.lengths)
    jagged = torch.nested.nested_tensor([batch.query[0], batch.query[1]], layout=torch.jagged)
    plan = plan_paged_decode(jagged, batch.keys).fill(batch.lengths)
    for _ in range(2):
        paged_decode(*tensors(batch))
        paged_decode(*tensors(batch), mask_mod=mask, plan=masked)
        paged_decode(jagged, *tensors(batch)[1:], plan=plan)
    assert found.counts == (6, 0)


def test_off_every_call_takes_the_usual_way(found: Found) -> None:
    assert Tuning().direct_launch
    batch = paged_batch([90])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    for _ in range(2):
        usual(batch, plan=plan)
    assert found.counts == (2, 0)


def test_what_has_failed_is_checked_again(found: Found) -> None:
    batch = paged_batch([90, 40])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    for _ in range(2):
        with pytest.raises(ValueError, match="lengths"):
            paged_decode(*tensors(batch)[:4], batch.lengths[:1], plan=plan)
    assert found.counts == (0, 0)


def test_it_is_launched_on_the_device_it_was_loaded_on(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever device is the current one."""
    batch = paged_batch([90])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    entered: list[Any] = []
    paged_decode(*tensors(batch), plan=plan)

    def device(index: Any) -> contextlib.AbstractContextManager[None]:
        entered.append(index)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    paged_decode(*tensors(batch), plan=plan)
    assert entered == []
    direct_module.driver.active.get_current_device = lambda: HERE + 1  # type: ignore[attr-defined]
    paged_decode(*tensors(batch), plan=plan)
    assert entered == [HERE]
    assert found.counts == (1, 2)


def test_profilers_hear_of_launches(found: Found) -> None:
    """As of any launch of Triton's; without one, nobody is told."""
    batch = paged_batch([90])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)

    def hears(metadata: Any) -> None:
        """Proton's hook."""

    told.clear()
    for _ in range(2):
        paged_decode(*tensors(batch), plan=plan)
    assert told == []
    knobs.runtime.launch_enter_hook.add(hears)
    try:
        paged_decode(*tensors(batch), plan=plan)
    finally:
        knobs.runtime.launch_enter_hook.remove(hears)
    assert told == ["Triton's way"]
    paged_decode(*tensors(batch), plan=plan)
    assert found.counts == (1, 3)
    assert told == ["Triton's way"]


def test_a_key_that_forgets_strides_reads_other_memory(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what the key tells is needed."""
    batch = paged_batch([90, 40])
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    wide = torch.cat([batch.query, torch.randn_like(batch.query)], -1)[..., :64]
    strided = dataclasses.replace(batch, query=wide)
    assert torch.equal(wide, batch.query)

    def asked() -> torch.Tensor:
        paged_decode(*tensors(batch), plan=plan)
        result: torch.Tensor = paged_decode(*tensors(strided), plan=plan)
        return result

    assert torch.equal(asked(), usual(batch))
    plan.launches.clear()
    monkeypatch.setattr(paged, "direct_key", lambda *_: ("the same",))
    assert error(asked().float(), usual(batch).float()) > 0.1


def test_few_functions_are_called_on_the_way(found: Found) -> None:
    """Counts Python functions from the call to the launch. Their time on a GPU's host is measured by
    `python -m pd_bench.kernels decode --only "host of a call"`."""
    batch = paged_batch([20])
    out = torch.empty_like(batch.query)
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)
    called: list[str] = []

    def watch(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    def until_launched() -> int:
        called.clear()
        gc.disable()  # it calls what waits for the end of an object
        sys.setprofile(watch)
        try:
            paged_decode(*tensors(batch), out=out, plan=plan)
        finally:
            sys.setprofile(None)
            gc.enable()
        names = called[: called.index("Compiled.run")]
        return len(names)

    paged_decode(*tensors(batch), out=out, plan=plan)
    assert until_launched() <= 20


def test_latents_of_the_gluon_kernel_take_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors are made for each cache."""
    launched: list[Any] = []
    monkeypatch.setattr(MlaCall, "gluon", True)
    batch = mla_batch([90])
    plan = plan_mla_decode(batch.query, batch.cache).fill(batch.lengths)
    monkeypatch.setattr(
        "pd_kernels.attention.mla.launch_mla_gluon", lambda *each: launched.append(each)
    )
    for _ in range(2):
        mla_decode(batch.query, batch.cache, batch.table, batch.lengths, scale=0.1, plan=plan)
    assert len(launched) == 2
    assert not plan.launches
