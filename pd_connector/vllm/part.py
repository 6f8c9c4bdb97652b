# SPDX-License-Identifier: Apache-2.0
"""A part of the connector in the scheduler: handing over, fetching, the pool. All have the same hooks.

`scheduler_side.SchedulerSide` calls each hook of each part, in the order of its list. A part that is not configured is
not in the list.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import RequestStatus

from pd_connector.agent.commands import Command
from pd_connector.vllm.messages import Cut, StepCommands, WorkerActivity

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""States of a request that has come to its own end."""


class Ended(NamedTuple):
    """What follows from the end of a request."""

    keeps_pages: bool = False  # until a worker, or a step, says that they may be freed
    answer: dict[str, Any] | None = None  # for the proxy
    commands: Iterable[Command] = ()


class Part:
    """Called by vLLM's scheduler only. Hooks do nothing by default; commands go to the workers with the next step."""

    @property
    def pending(self) -> bool:
        """Whether a step is needed even without a request."""
        return False

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages, before the first request."""

    def queued(self, request: "Request") -> None:
        """A request has come."""

    def matched(self, request: "Request", computed: int) -> int | None:
        """Number of tokens that this part can load beyond the `computed` tokens that are here; None: ask again
        later."""
        return 0

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> list[Command] | None:
        """vLLM has given pages to a request.

        Args:
            blocks: all its pages.
            external_tokens: number of tokens that this or another part loads.

        Returns:
            Commands if this part fills these pages; None to ask the next part.
        """
        return None

    def step(self, output: "SchedulerOutput", commands: StepCommands) -> None:
        """A step was scheduled: add what the workers must know."""

    def broke_off(self, cuts: Mapping[str, Cut]) -> None:
        """Ranks could not load all KV of some requests. The ends of these loads are reported next, or later if other ranks go on."""

    def load_ended(self, request_id: str, *, failed: bool) -> bool:
        """The workers reported the end of a load. Returns whether it was this part's.

        Args:
            failed: whether vLLM keeps none of the load's pages.
        """
        return False

    def reported(self, activity: WorkerActivity) -> list[Command]:
        """What the workers did since the last step."""
        return []

    def weights_changed(self) -> list[Command]:
        """The weights have changed: KV of all requests that are here is of the old weights, or of both."""
        return []

    def reset(self) -> None:
        """vLLM's caches were reset: what was there before must not be used."""

    def finished(self, request: "Request", pages: tuple[list[int], ...]) -> Ended:
        """A request with these pages (by table) has ended. If this part keeps its pages, later parts are not called."""
        return Ended()

    def close(self) -> None:
        """The engine ends."""
