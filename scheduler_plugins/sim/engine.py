# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: prefill in steps with a budget, a prefix cache, and decode in the same steps or on another
machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.decode import DecodeStage
from scheduler_plugins.sim.prefill import PrefillChunk as PrefillChunk
from scheduler_plugins.sim.prefill import PrefillStage, RunningPrefill
from scheduler_plugins.sim.prefill import SimulatedStep as SimulatedStep
from scheduler_plugins.sim.served import Served as Served

END, ARRIVAL, START = 0, 1, 2
"""The order of events at one time: ends, then arrivals, then starts."""
_SLACK_S = 1e-9


class SimulatedEngine:
    """Takes prompts from a queue as vLLM does with our scheduler (`PrefillStage`), and generates
    their tokens.

    The caller waits until `next_event_s`, and calls `advance`. Between two events it can add prompts (`arrive`), and
    sequences whose KV another engine computed (`receive`). `run` drives a single engine.

    With `decode_apart`, a separate machine decodes, and admits every sequence at once, because the benchmarks of the
    queue measure only prefill. Without it, a step with prompt tokens also decodes, and the KV of all sequences must fit
    into `kv_tokens`. If the KV does not fit, the sequence that joined last is preempted and computed again.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        cache: LruBlocks,
        truth: CostModel,
        *,
        page_size: int,
        decode_apart: bool = True,
        kv_tokens: float = inf,
    ) -> None:
        """An idle engine. `queue` must be made with `cache.hashes`. The cache's notifications are connected to it here."""
        self.queue = queue
        self.prefill = PrefillStage(queue, cache, truth, page_size=page_size)
        self.decode = (
            DecodeStage(truth)
            if decode_apart
            else DecodeStage(truth, capacity_tokens=kv_tokens, slack_s=_SLACK_S)
        )
        self.truth = truth
        self._apart = decode_apart
        if not decode_apart:
            self.prefill.decoding = lambda: self.decode.batch
        self._kv_tokens = kv_tokens
        if kv_tokens < inf:
            self.prefill.may_start = self._may_start
        self._step: float | None = None  # the end of the running step
        self._load: StepLoad | None = None
        self._left_s = 0.0
        self._blocked = False
        self._decoding: dict[str, tuple[Served, Waiting]] = {}
        self._joining: list[tuple[Waiting, Served]] = []
        self.reserved_tokens = 0
        """Room reserved for sequences whose KV is on its way."""
        self.busy_s = 0.0
        """Time spent in steps with prompts. `decode.busy_s` is the rest."""
        self.next_event_s = inf
        """Time of the next event for `advance`."""
        self.next_kind = END
        """Kind of the next event, `END` or `START`."""
        self.admit: Callable[[Waiting, float], bool] = _everything
        """Called on arrival, with the seconds until the running prefills end."""
        self.hand_over: Callable[[RunningPrefill, float], bool] = _keep
        """Called with each computed prompt. True: another engine decodes it."""
        self.on_first_token: Callable[[Served], None] = _ignore
        """Called when a request has its first token."""
        self.on_end: Callable[[Served], None] = _ignore
        """Called when the last token was generated."""
        self.on_step: Callable[[SimulatedStep], None] = _ignore_step
        """Called for every step with prompt tokens."""

    def run(self, requests: Iterable[Waiting]) -> list[Served]:
        """Serve everything; the results are in the order of arrival.

        Args:
            requests: in order of arrival. Each generates exactly `max_tokens` tokens.
        """
        arrivals, served = deque(requests), list[Served]()
        while arrivals or self.next_event_s < inf:
            coming = (arrivals[0].arrival_s, ARRIVAL) if arrivals else (inf, ARRIVAL)
            if (self.next_event_s, self.next_kind) < coming:
                self.advance(self.next_event_s)
            else:
                request = arrivals.popleft()
                served.append(Served(request))
                self.arrive(request, served[-1], request.arrival_s)
        self._ended(self.decode.advance(inf))
        return served

    def arrive(self, request: Waiting, record: Served, now_s: float) -> None:
        """Add a prompt to compute, and to decode unless `hand_over` takes it."""
        self._decode_until(now_s)
        busy_s = 0.0 if self._step is None else self._step - now_s + self._left_s
        if self.admit(request, busy_s):
            self.prefill.add(request, record)
        self._blocked = False
        self._plan(now_s)

    def receive(self, request: Waiting, record: Served, now_s: float) -> None:
        """Add a sequence whose KV has arrived. Its next token is its first here. `reserved_tokens` has reserved its
        room."""
        self.reserved_tokens -= request.tokens
        if self._step is None:
            self._decode_until(now_s)
            self._join(request, record, now_s)
        else:
            self._joining.append((request, record))
        self._plan(now_s)

    def cancel(self, request_id: str) -> int:
        """Forget a request in any state. Returns its tokens still to generate; 0 if it is not here."""
        for n, (joining, _) in enumerate(self._joining):
            if joining.id == request_id:
                del self._joining[n]
                return joining.max_tokens
        if request_id in self._decoding:
            self._decoding.pop(request_id)
            taken = self.decode.cancel(request_id)
            return taken.more if taken else 0
        request = self.prefill.cancel(request_id)
        return request.max_tokens if request else 0

    def settle(self, now_s: float) -> None:
        """Decode up to `now_s`, so every sequence has its tokens of that time."""
        self._decode_until(now_s)

    def has_room(self, tokens: int) -> bool:
        """Whether the KV of `tokens` tokens fits beside the present KV. An empty engine takes anything."""
        used = self.decode.context + self.reserved_tokens
        return used + tokens <= self._kv_tokens or not used

    @property
    def free_kv(self) -> float:
        """Tokens for which there is room."""
        return self._kv_tokens - self.decode.context - self.reserved_tokens

    def advance(self, now_s: float) -> None:
        """Handle the event at `now_s`, which must be `next_event_s`: a step ends, or a step begins."""
        if self._step is not None:
            self._end_step(self._step)
        elif self.next_kind == START:
            self._start_step(now_s)
        else:
            self._decode_until(now_s)
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        """Set `next_event_s`."""
        if self._step is not None:
            self.next_event_s, self.next_kind = self._step, END
        elif len(self.prefill) and not self._blocked:
            self.next_event_s, self.next_kind = now_s, START
            # A step can still run although all its sequences get their last token.
            if not self._apart:
                self.next_event_s = max(now_s, self.decode.now_s)
        elif not self._apart:
            self.next_event_s, self.next_kind = self.decode.next_end_s, END
        else:
            self.next_event_s = inf

    def _start_step(self, now_s: float) -> None:
        chunks = self.prefill.next_step(now_s)
        if not chunks:
            self._blocked = not self._apart
            return
        load = StepLoad.of([(chunk.first, chunk.stop) for chunk in chunks])
        if not self._apart and self.decode.batch:
            load = load._replace(batch=self.decode.batch, context=self.decode.context)
        self._step = now_s + self.truth.step_s(load)
        self._load = load
        self._left_s = self.prefill.left_s() if self.truth.chunk_tokens else 0.0
        self.busy_s += self._step - now_s
        if self.on_step is not _ignore_step:
            self.on_step(SimulatedStep(chunks, load, now_s, self._step))

    def _end_step(self, now_s: float) -> None:
        self._step = None
        self.prefill.cache.computed(now_s)
        if self._load is not None and self._load.batch:
            self._decoded(self.decode.mixed_step(now_s))
        for prefill in self.prefill.take_ended():
            if prefill.record.prefilled_s is None:
                prefill.record.prefilled_s = now_s
            if not self.hand_over(prefill, now_s):
                self._finish(prefill, now_s)
        for request, record in self._joining:
            self._join(request, record, now_s)
        self._joining = []

    def _finish(self, prefill: RunningPrefill, now_s: float) -> None:
        """Called when a prompt was computed and has its first token."""
        record, request = prefill.record, prefill.request
        if record.first_token_s is None:
            record.first_token_s = now_s
            self.on_first_token(record)
        self._decode_until(now_s)
        self._decoding[request.id] = record, request
        if request.max_tokens > 1:
            self.decode.add(request.id, request.tokens, request.max_tokens - 1, now_s)
        else:
            self._ended([(request.id, now_s)])

    def _join(self, request: Waiting, record: Served, now_s: float) -> None:
        self._decoding[request.id] = record, request
        self.decode.add(request.id, request.tokens, request.max_tokens, now_s, fresh=True)

    def _decode_until(self, now_s: float) -> None:
        if self._apart:
            self._ended(self.decode.advance(now_s))
        elif self._step is None:
            self._decoded(self.decode.advance(now_s))

    def _decoded(self, ended: Sequence[tuple[str, float]]) -> None:
        """Note first and last tokens. Queue preempted sequences again."""
        stage = self.decode
        if stage.first_tokens:
            for request_id, at_s in stage.first_tokens:
                record, _ = self._decoding[request_id]
                if record.first_token_s is None:
                    record.first_token_s = at_s
                    self.on_first_token(record)
            stage.first_tokens = []
        if ended:
            self._ended(ended)
        if stage.preempted:
            for sequence in stage.preempted:
                record, request = self._decoding.pop(sequence.request_id)
                record.preemptions += 1
                again = replace(request, tokens=sequence.tokens, max_tokens=sequence.more)
                self.prefill.put_first(again, record)
            stage.preempted = []

    def _ended(self, ended: Sequence[tuple[str, float]]) -> None:
        """Note that these sequences have their last token."""
        if not ended:
            return
        self._blocked = False
        for request_id, end_s in ended:
            record, _ = self._decoding.pop(request_id)
            record.end_s = end_s
            self.on_end(record)

    def _may_start(self, request: Waiting) -> bool:
        running = sum(prefill.request.tokens for prefill in self.prefill.running)
        return self.has_room(request.tokens + running) or not (running or self.decode.batch)


def _everything(request: Waiting, busy_s: float) -> bool:
    return True


def _keep(prefill: RunningPrefill, now_s: float) -> bool:
    return False


def _ignore(served: Served) -> None:
    pass


def _ignore_step(step: SimulatedStep) -> None:
    pass
