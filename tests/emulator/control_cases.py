# SPDX-License-Identifier: Apache-2.0
"""Negative controls of vLLM's steps: each guard of a step is undone once, and the results must show it."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from mla_cases import LatentDoor
from streams import Stream
from torch_device import gpu
from transfer_cases import Case
from vllm_cases import BESIDE_PROMPTS, BY_HEAD, DECODES, PagedDoor
from vllm_door import few_processors, problem_of

from pd_kernels.attention import DecodePlan

Damage = Callable[[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _told(batch: Any, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The engine tells the builder other metadata than it has."""
    whole = batch.common()
    changed = {name: change(getattr(whole, name)) for name, change in changes.items()}
    with mock.patch.object(batch, "common", return_value=dataclasses.replace(whole, **changed)):
        yield


def _smaller_plan(batch: Any) -> contextlib.AbstractContextManager[Any]:
    fill = DecodePlan.fill

    def fill_less(plan: DecodePlan, lengths: torch.Tensor) -> DecodePlan:
        fill(plan, lengths[:-1])
        plan.filled[0] = lengths.numel()  # what the call checks
        return plan

    return mock.patch.object(DecodePlan, "fill", fill_less)


def _no_scales() -> contextlib.AbstractContextManager[Any]:
    backend = importlib.import_module("pd_kernels.vllm.paged_backend")
    return mock.patch.object(backend.PagedImpl, "_scales", return_value={})


def _largest_scale() -> contextlib.AbstractContextManager[Any]:
    cuda = importlib.import_module("pd_kernels.vllm.paged_cuda")
    return mock.patch.object(cuda.PagedFlashImpl, "scales_by_head", False)


def _no_wait(batch: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Stream, "wait_event")


DAMAGES: dict[str, Damage] = {
    "slots of other tokens": lambda batch: _told(batch, slot_mapping=lambda x: x.roll(1)),
    "lengths of the step before": lambda batch: _told(batch, seq_lens=lambda x: x - 1),
    "rows of the block table swapped": lambda batch: _told(
        batch, block_table_tensor=lambda x: x[[1, 0, 2]]
    ),
    "a plan without the last request": _smaller_plan,
    "no wait for the stream that brought KV": _no_wait,
}

SCALES_LEFT_OUT: dict[str, Damage] = {
    "no scales of the cache": lambda _: _no_scales(),
}

ONE_SCALE: dict[str, Damage] = {
    **SCALES_LEFT_OUT,
    "the largest scale for all heads": lambda _: _largest_scale(),
}


def _rest(batch: Any, *names: str) -> contextlib.AbstractContextManager[Any]:
    """The stock backend gets the first requests' metadata instead of the rest's."""
    builder: Any = importlib.import_module("pd_kernels.vllm.paged_builder")
    split = builder.rest_of

    def unsplit(common: Any, decodes: Any) -> Any:
        rest = split(common, decodes)
        told = {name: getattr(common, name)[: len(getattr(rest, name))] for name in names}
        return dataclasses.replace(rest, **told)

    return mock.patch.object(builder, "rest_of", unsplit)


SPLITS: dict[str, Damage] = {
    "lengths of decodes for prompts": lambda batch: _rest(batch, "seq_lens"),
    "pages of decodes for prompts": lambda batch: _rest(batch, "block_table_tensor"),
    "queries of decodes for prompts": lambda batch: _rest(batch, "query_start_loc"),
}
"""Damages to the split of a batch into decodes and prompts."""


def _step(door: Any, batch: Any, damage: Damage = contextlib.nullcontext) -> None:
    """What requests had before a step comes by a stream of its own, as a handoff's."""
    door.forget()
    torch.cuda.synchronize()
    bringing = Stream()
    with torch.cuda.stream(bringing):
        door.write(batch)
    with damage(batch):
        torch.cuda.current_stream().wait_stream(bringing)
        door.check(batch, door.step(batch))


def controls(
    make: Callable[[], Any],
    damages: dict[str, Damage],
    requests: tuple[tuple[int, int], ...] = DECODES,
) -> None:
    """A step is right, but wrong with each damage."""
    with gpu(), few_processors():
        door = make()
        batch = door.batch(requests)
        found = {
            name: problem_of(functools.partial(_step, door, batch, damage))
            for name, damage in damages.items()
        }
        _step(door, batch)
    unfound = [name for name, told in found.items() if not told]
    assert not unfound, f"not found: {', '.join(unfound)}"


CONTROLS: dict[str, Case] = {
    "vllm, controls": functools.partial(controls, PagedDoor, DAMAGES),
    "vllm, controls, fp8": functools.partial(
        controls, functools.partial(PagedDoor, "fp8"), SCALES_LEFT_OUT
    ),
    "vllm, controls, fp8 by head": functools.partial(
        controls, functools.partial(PagedDoor, "fp8", scales=BY_HEAD), ONE_SCALE
    ),
    "vllm, controls, beside prompts": functools.partial(
        controls, PagedDoor, SPLITS, BESIDE_PROMPTS
    ),
    "vllm, controls, mla": functools.partial(controls, LatentDoor, DAMAGES),
}
