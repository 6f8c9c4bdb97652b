# SPDX-License-Identifier: Apache-2.0
"""The load report: the state of an engine that admission and routing need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.queue.waiting import WaitingQueue

MOST_PREFILL = 0.9
"""Cap of `prefill_share`. Near 1 the predicted time per token would grow without bound."""


class Decoding(msgspec.Struct, frozen=True, array_like=True):
    """A sequence in decode."""

    age_s: float
    context: int


class ClassLoad(msgspec.Struct, frozen=True):
    """The waiting work of one class. The lists are by cost, see `queue.work.bucket_of`."""

    waiting: int
    """Requests."""
    tokens: int
    """Tokens in them."""
    work_s: tuple[float, ...]
    """Seconds of prefill that wait."""
    arriving: tuple[float, ...]
    """Seconds of prefill that come per second."""
    balance_s: float
    """Seconds of reserve that the class has not used. This amount of its work goes first."""


class LoadReport(msgspec.Struct, frozen=True):
    """The state of one engine that predictions need. It may cross a process boundary."""

    model: CostModel
    prefill_left_s: float
    """Time until the running prefills are done."""
    classes: dict[str, ClassLoad]
    decoding: tuple[Decoding, ...] = ()
    running: int = 0
    """Requests in prefill or decode."""
    decode_tokens: float = 0.0
    """Mean number of tokens that a sequence generates; 0 if none has ended yet."""
    prefill_share: float = 0.0
    """Fraction of the engine's time that goes to prefill while it decodes; 0 if it does only one of the two."""

    @property
    def requests(self) -> int:
        """Requests that wait or run. vLLM's balancer sends the next request to the rank with the fewest."""
        return self.running + sum(load.waiting for load in self.classes.values())

    @property
    def decode_s(self) -> float:
        """Time that a sequence decodes in the present batch; 0 if unknown.

        This is not the mean of ended sequences, because in a growing batch the fast sequences end first.
        """
        context = sum(sequence.context for sequence in self.decoding)
        return self.decode_tokens * self.token_s(len(self.decoding), context)

    def token_s(self, batch: int, context: int) -> float:
        """Time between two tokens of `batch` sequences that have `context` tokens together.

        Prefill chunks share these steps, and lengthen all of them.
        """
        share = min(self.prefill_share, MOST_PREFILL)
        return self.model.decode_step_s(batch, context) / (1.0 - share)

    @classmethod
    def of(
        cls,
        queue: WaitingQueue,
        model: CostModel,
        now_s: float,
        *,
        prefill_left_s: float = 0.0,
        decoding: Iterable[Decoding] = (),
        decode_tokens: float = 0.0,
        running: int = 0,
    ) -> Self:
        """Report a queue and the work of its engine. `now_s` is by the clock of the arrivals."""
        classes = {}
        for name in queue.classes:
            class_queue = queue.class_queue(name)
            work = class_queue.work
            classes[name] = ClassLoad(
                len(class_queue),
                class_queue.tokens,
                work.waiting_s,
                work.arriving(now_s),
                queue.fair_share.balance_s(name),
            )
        return cls(
            model,
            prefill_left_s,
            classes,
            tuple(decoding),
            decode_tokens=decode_tokens,
            running=running,
        )
