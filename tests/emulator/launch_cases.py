# SPDX-License-Identifier: Apache-2.0
"""How many launches a decode step of vLLM takes: to plan it, once, and in each layer. The table is in
docs/kernels_decode.md."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from mla_cases import LatentDoor, ScaledDoor, SparseDoor
from streams import STREAMS
from torch_device import gpu
from transfer_cases import Case
from vllm_cases import PagedDoor
from vllm_door import Door, few_processors


class Launches(NamedTuple):
    """Kernels in Triton, and operations and copies of torch, each of which is a launch of its own."""

    kernels: int
    torch: int = 0


@contextlib.contextmanager
def _counted() -> Iterator[Callable[[], Launches]]:
    """Count the work that is queued for the device."""
    queue, kernels = STREAMS.queue, []

    def counting(work: Any, stream: Any = None) -> None:
        kernels.append(getattr(getattr(work, "func", None), "__name__", "") == "_run")
        queue(work, stream)

    with mock.patch.object(STREAMS, "queue", counting):
        yield lambda: Launches(sum(kernels), len(kernels) - sum(kernels))


def launches(
    make: Callable[[], Door],
    plan: Launches,
    layer: Launches,
    requests: tuple[tuple[int, int], ...] = ((1, 70),),
    verified: int = 1,
) -> None:
    """A step whose kernels are compiled."""
    with gpu(), few_processors():
        door = make()
        door.builder.reorder_batch_threshold = verified
        batch = door.batch(requests)
        door.write(batch)
        door.step(batch)
        common, new, found = batch.common(), door.new(batch), []
        with _counted() as planned:
            metadata = door.builder.build(0, common)
        owner, name = door.backend
        forward = getattr(owner, name)

        def forwarded(*given: Any, **named: Any) -> Any:
            with _counted() as taken:
                out = forward(*given, **named)
            found.append(taken())
            return out

        with mock.patch.object(owner, name, forwarded), door.context(metadata, common.slot_mapping):
            door.call(*new)
        assert (planned(), *found) == (plan, layer), f"planned {planned()}, layers {found}"


ONE = Launches(1)
COUNTS: dict[str, Case] = {
    f"launches, {name}": functools.partial(launches, *given)
    for name, given in {
        "paged": (PagedDoor, ONE, ONE),
        "paged, 8 requests": (PagedDoor, ONE, ONE, tuple((1, 5 + n) for n in range(8))),
        "mla": (LatentDoor, ONE, Launches(1, 1)),
        "mla, one scale": (ScaledDoor, ONE, Launches(1, 1)),
        "mla, 40 heads": (functools.partial(LatentDoor, 40), ONE, Launches(2, 1)),
        "mla, ragged": (LatentDoor, Launches(1, 11), Launches(2, 3), ((4, 70), (1, 3)), 4),
        "sparse mla": (SparseDoor, Launches(2, 9), Launches(2, 1)),
    }.items()
}
