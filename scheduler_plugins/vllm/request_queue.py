# SPDX-License-Identifier: Apache-2.0
"""vLLM's queue of waiting requests, in our order.

vLLM's scan asks `bool`, peeks, and then either pops the request or stops. A popped request is started, parked among the
requests that hold KV, or skipped. Skipped requests come back through `prepend_requests` when the scan ends. Preempted
requests come back through `prepend_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.request_id import class_in
from scheduler_plugins.qos.settings import QOS_KEY
from scheduler_plugins.queue.step_length import tokens_before
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.vllm.cache import CacheView

if TYPE_CHECKING:
    from vllm.v1.request import Request


ROOM_AGAIN = 8
"""Scans between two steps that reserve room, beside a prefill, for a request that vLLM has skipped twice or more. The adapter
limit can last, and each time the room is lost. A connector that did not know at the first scan mostly knows at the next."""


def describe(request: Request, cache: CacheView) -> Waiting:
    """A request of vLLM in the form that the queue uses."""
    return Waiting(
        id=request.request_id,
        tokens=request.num_tokens,
        block_hashes=cache.hashes(request),
        arrival_s=request.arrival_time,
        qos=qos_of(request),
        max_tokens=request.max_tokens,
        priority=request.priority,
        loaded=request.num_prompt_tokens if is_loaded(request) else 0,
    )


def qos_of(request: Request) -> str:
    """The request's class, as the client or the middleware wrote it. A class with this name need not exist."""
    if request.sampling_params is None:
        return class_in(request.request_id)
    extra = request.sampling_params.extra_args
    named = (extra or {}).get(QOS_KEY)
    return named if isinstance(named, str) else ""


def tokens_left(request: Request) -> int:
    """Tokens of a prefill that are not computed yet."""
    return int(request.num_tokens - request.num_computed_tokens)


def is_loaded(request: Request) -> bool:
    """Whether another engine sends the prompt's KV, and the transfer has not been tried yet."""
    return _has_param(request, "do_remote_prefill") and request.num_preemptions == 0


def is_prefill_only(request: Request) -> bool:
    """Whether no request continues from this request's KV: it generates one token, which is the last.

    A prompt that is prefilled for another engine also generates one token here. But its conversation goes on, and the
    next prompt begins with this prompt.
    """
    return request.max_tokens == 1 and not _has_param(request, "do_remote_decode")


def _has_param(request: Request, name: str) -> bool:
    """Whether this key of the request's transfer parameters is true. Clients can write anything into them
    (`vllm_xargs`)."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get(name))


class OrderedRequests(RequestQueue):
    """Never loses a request or gives it out twice. If an id comes again, it replaces itself."""

    def __init__(self, queue: WaitingQueue, cache: CacheView) -> None:
        self._queue = queue
        self._cache = cache
        self._requests: dict[str, Request] = {}
        self._scanning = False
        self._peeked: str | None = None
        self._popped: Request | None = None
        self._taken: dict[str, Waiting] = {}
        self._scans = 0
        self._passed_by: dict[str, tuple[int, int]] = {}
        """How often vLLM skipped a request for its own reasons, and in which scan it did so last."""

    def begin_scan(self, *, full: bool = False, prefilling: Collection[str] = ()) -> None:
        """Called when the engine begins a step; see `WaitingQueue.begin_scan`."""
        self._cache.tell(self._queue.prefix_index)
        self._queue.begin_scan(full=full, prefilling=prefilling)
        self._taken = {}
        self._scanning = True
        self._scans += 1

    def end_scan(self, has_room: Callable[[Request], bool]) -> None:
        """Called when the step is scheduled.

        vLLM ends its scan at a request that it peeks at and does not pop. Its cache has no room, or vLLM has its own
        reasons (the cadence of data-parallel balancing, the budget of the step).

        Args:
            has_room: whether vLLM's cache has room for that request.
        """
        if self._popped:
            self._settle(self._popped)
        if self._peeked is not None and not has_room(self._requests[self._peeked]):
            self._queue.turned_back.add(self._peeked)
        self._peeked = None
        self._scanning = False

    def head(self) -> Request | None:
        """The request that vLLM would get next, if any."""
        if self._popped:
            self._settle(self._popped)
        self._cache.tell(self._queue.prefix_index)
        first = self._queue.peek()
        return self._requests[first.id] if first else None

    def is_owed_over(self, prefill: Request) -> bool:
        """Whether a running prefill should be preempted for the next request. There must be a next request."""
        head = self._queue.head
        return head is not None and self._queue.fair_share.should_yield(
            qos_of(prefill), head.class_name
        )

    def tokens_before(self, prefill: Request, budget_tokens: int) -> int:
        """See `step_length.tokens_before`; 0 if the next request waits for anything except its turn."""
        head = self.head()
        if (
            head is None
            or head.request_id in self._queue.turned_back
            or head.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            or not self._gets_room(head)
        ):
            return 0
        described = describe(prefill, self._cache)
        return tokens_before(self._queue, described, prefill.num_computed_tokens, budget_tokens)

    def _gets_room(self, head: Request) -> bool:
        times, scan = self._passed_by.get(head.request_id, (0, 0))
        return times < 2 or self._scans - scan >= ROOM_AGAIN

    def add_request(self, request: Request) -> None:
        self._forget(request.request_id)
        self._requests[request.request_id] = request
        self._queue.add(describe(request, self._cache))

    def peek_request(self) -> Request:
        request = self.head()
        if request is None:
            raise IndexError("peek from a queue that has no request to start")
        self._peeked = request.request_id
        return request

    def pop_request(self) -> Request:
        if self._popped:
            self._settle(self._popped)
        taken = self._queue.pop()
        request = self._requests.pop(taken.id)
        self._taken[taken.id] = taken
        self._peeked, self._popped = None, request
        return request

    def prepend_request(self, request: Request) -> None:
        """Take back a preempted request. It becomes the first of its class, and is already paid for."""
        if not self._scanning:
            # Requests popped in the last scan are running. They must not count as not started.
            self._queue.begin_scan()
            self._taken = {}
        self._put_back(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Take back requests that were skipped in this scan. Each gets its own place back."""
        if self._popped:
            self._settle(self._popped)
        for request in requests:
            self._put_back(request)

    def remove_request(self, request: Request) -> None:
        if request.request_id not in self._requests:
            raise ValueError(f"request {request.request_id}: is not waiting")
        self._forget(request.request_id)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._forget(request.request_id)

    def __bool__(self) -> bool:
        """Whether there is a request to start now. A batch may take no further request although requests wait."""
        if not self._queue.may_end_early:
            return bool(self._requests)
        return self.head() is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        for waiting in self._queue:
            yield self._requests[waiting.id]

    def _put_back(self, request: Request) -> None:
        if request.request_id in self._requests:
            self._forget(request.request_id)
        self._requests[request.request_id] = request
        taken = self._taken.get(request.request_id)
        self._queue.prepend(taken or describe(request, self._cache))

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._passed_by.pop(request_id, None)
        if self._peeked == request_id:
            self._peeked = None
        self._queue.remove(request_id)

    def _settle(self, popped: Request) -> None:
        """Find the fate of the request that was popped last.

        vLLM marks it as running after the pop and before it looks at the queue again.
        """
        self._popped = None
        times, _ = self._passed_by.pop(popped.request_id, (0, 0))
        if popped.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._queue.loads(popped.request_id)
        elif popped.status != RequestStatus.RUNNING:
            self._queue.skipped(popped.request_id)
            self._passed_by[popped.request_id] = times + 1, self._scans
