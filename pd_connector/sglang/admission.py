# SPDX-License-Identifier: Apache-2.0
"""Which requests come into SGLang's queues: those that end neither the engine nor another request."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

MAX_ROOM = (1 << 63) - 1
"""Largest `bootstrap_room`: what fits in a signed 64-bit integer."""
_LONGEST_HOST = 253
"""Characters of a name in the domain name system."""


class Admission:
    """Of one rank. What it says depends on nothing that differs from rank to rank: all must take the same requests.

    Args:
        produces: whether this is a prefill engine.
        vocabulary: the first number that is no token of the model's.
        most_logprobs: top log probabilities of a first token that SGLang's metadata buffers have room for.
        in_step: whether requests come and end in the same step on all ranks. The stages of a pipeline are not in
            step: which rooms are in use differs between them, and is not asked then.
    """

    def __init__(
        self, *, produces: bool, vocabulary: int, most_logprobs: int, in_step: bool
    ) -> None:
        self._produces = produces
        self._in_step = in_step
        self._vocabulary = vocabulary
        self._most_logprobs = most_logprobs
        self.page_size = 1
        self.most_prompt_tokens: float = inf
        """The longest prompt for which SGLang's queue of a decode engine ever finds room."""
        self._rooms: set[int] = set()  # of requests that are in SGLang's queues

    def enter(self, room: int) -> None:
        """A request with this room has come into a queue."""
        if self._in_step:
            self._rooms.add(room)

    def leave(self, room: int) -> None:
        """It has ended, on all ranks."""
        self._rooms.discard(room)

    def room_problem(self, req: Any) -> str:
        """Why a request cannot have the transfer that it names; empty where it can."""
        problem = room_problem(req.bootstrap_room)
        if problem or req.bootstrap_room not in self._rooms:
            return problem
        return (
            f"bootstrap_room {req.bootstrap_room}: another request has it now, and each needs its own. (SGLang gives "
            "all answers of a request one room: send the request n times, with n 1)"
        )

    def length_problem(self, tokens: int) -> str:
        """Why there is never room for a prompt of so many tokens; empty where there is. SGLang would let it wait for ever, and
        all that come after it."""
        if -(-tokens // self.page_size) * self.page_size <= self.most_prompt_tokens:
            return ""
        return (
            f"a prompt of {tokens} tokens: this engine's cache has room for {self.most_prompt_tokens} beside what SGLang keeps "
            "for an answer (--num-reserved-decode-tokens); raise --max-total-tokens, or --mem-fraction-static"
        )

    def request_problem(self, req: Any) -> str:
        """Why a request cannot be served, beside its room; empty where it can."""
        problem = "" if self._produces else host_problem(req.bootstrap_host)
        # In place of images SGLang has put numbers of its own.
        if req.multimodal_inputs is None:
            problem = problem or tokens_problem(req.origin_input_ids, self._vocabulary)
        problem = problem or logprobs_problem(req, self._most_logprobs)
        return problem or self.length_problem(len(req.origin_input_ids))


def room_problem(room: Any) -> str:
    """Why a request cannot have this room; empty where it can. Room 0 means "none" to SGLang."""
    if type(room) is int and 0 < room <= MAX_ROOM:
        return ""
    return f"bootstrap_room {room!r}: must be a whole number from 1 to {MAX_ROOM}"


def host_problem(host: Any) -> str:
    """Why a decode engine cannot ask this host (`bootstrap_host`) for KV; empty where it can be tried.
    SGLang makes an address of it, and what that raises would end the engine."""
    if isinstance(host, str) and 0 < len(host) <= _LONGEST_HOST:
        return ""
    return f"bootstrap_host {host!r:.40}: must be the name or address of the prefill engine's host"


def tokens_problem(tokens: Sequence[int], vocabulary: int) -> str:
    """Why no engine can compute this prompt; empty where it can. SGLang looks each token up in the model's
    table without asking whether it is there, and the engine ends. So does a prefill engine that has no KV to give
    back: SGLang refuses an empty prompt only where it is not in a list of several.

    Args:
        vocabulary: the first number that is no token of the model's.
    """
    if not len(tokens):
        return "the prompt is empty: there is no KV of it to hand over"
    ids = np.asarray(tokens)
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if not wrong.size:
        return ""
    return f"token {wrong[0]} in the prompt: the model's vocabulary has 0 to {vocabulary - 1}"


def logprobs_problem(req: Any, most: int) -> str:
    """Why the first token's log probabilities cannot be handed over; empty where they can. Where there is no
    room for them SGLang raises in its loop, and the prefill engine ends."""
    if not req.return_logprob or req.logprob.top_logprobs_num <= most:
        return ""
    found = req.logprob.top_logprobs_num
    return f"top_logprobs_num {found}: must be at most {most} where prefill and decode are apart"


def refuse(req: Any, problem: str, scheduler: Any) -> None:
    """End a request that has not come into a queue, with status 400, as SGLang ends those that it refuses
    itself: its session, for instance, does not wait for it."""
    req.set_finish_with_abort(problem)
    scheduler.retire_unadmitted_request(req)
