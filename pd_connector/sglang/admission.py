# SPDX-License-Identifier: Apache-2.0
"""Which requests enter SGLang's queues: only requests that can end neither the engine nor another request."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

MAX_ROOM = (1 << 63) - 1
"""Largest `bootstrap_room`: what fits in a signed 64-bit integer."""
_LONGEST_HOST = 253
"""Most characters of a name in the domain name system."""


class Admission:
    """Decides for one rank. All ranks must admit the same requests, so a decision uses nothing that differs from
    rank to rank.

    Args:
        produces: whether this is a prefill engine.
        vocabulary: size of the model's vocabulary, the first number that is not a token.
        most_logprobs: most top log probabilities of a first token that fit into SGLang's metadata buffers.
        in_step: whether requests come and end in the same step on all ranks. The stages of a pipeline are not in
            step: they differ in which rooms are in use, so rooms in use are then not checked.
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
        """The longest prompt for which a decode engine's queue in SGLang ever finds room."""
        self._rooms: set[int] = set()  # rooms of requests in SGLang's queues

    def enter(self, room: int) -> None:
        """A request with this room has entered a queue."""
        if self._in_step:
            self._rooms.add(room)

    def leave(self, room: int) -> None:
        """The request with this room has ended, on all ranks."""
        self._rooms.discard(room)

    def room_problem(self, req: Any) -> str:
        """Why a request cannot have the transfer that it names; empty if it can."""
        problem = room_problem(req.bootstrap_room)
        if problem or req.bootstrap_room not in self._rooms:
            return problem
        return (
            f"bootstrap_room {req.bootstrap_room}: another request uses it, and each request needs its own. (SGLang "
            "gives all answers of a request one room: send the request n times, with n 1)"
        )

    def length_problem(self, tokens: int) -> str:
        """Why a prompt of `tokens` tokens never finds room; empty if it does. SGLang would let it wait for ever, and
        all later requests with it."""
        if -(-tokens // self.page_size) * self.page_size <= self.most_prompt_tokens:
            return ""
        return (
            f"a prompt of {tokens} tokens: this engine's cache has room for {self.most_prompt_tokens} beside what SGLang keeps "
            "for an answer (--num-reserved-decode-tokens); raise --max-total-tokens, or --mem-fraction-static"
        )

    def request_problem(self, req: Any) -> str:
        """Why a request cannot be served, apart from its room; empty if it can."""
        problem = "" if self._produces else host_problem(req.bootstrap_host)
        # SGLang has replaced images by numbers of its own.
        if req.multimodal_inputs is None:
            problem = problem or tokens_problem(req.origin_input_ids, self._vocabulary)
        problem = problem or logprobs_problem(req, self._most_logprobs)
        return problem or self.length_problem(len(req.origin_input_ids))


def room_problem(room: Any) -> str:
    """Why a request cannot have this room; empty if it can. Room 0 means "none" to SGLang."""
    if type(room) is int and 0 < room <= MAX_ROOM:
        return ""
    return f"bootstrap_room {room!r}: must be a whole number from 1 to {MAX_ROOM}"


def host_problem(host: Any) -> str:
    """Why a decode engine cannot ask this host (`bootstrap_host`) for KV; empty if it can try. SGLang builds an
    address from the host; an exception there would end the engine."""
    if isinstance(host, str) and 0 < len(host) <= _LONGEST_HOST:
        return ""
    return f"bootstrap_host {host!r:.40}: must be the name or address of the prefill engine's host"


def tokens_problem(tokens: Sequence[int], vocabulary: int) -> str:
    """Why no engine can compute this prompt; empty if one can. SGLang looks up each token in the model's table
    without a bounds check, and the engine ends. A prefill engine without KV to return ends, too: SGLang refuses an
    empty prompt only if it is not in a list of several.

    Args:
        vocabulary: size of the model's vocabulary, the first number that is not a token.
    """
    if not len(tokens):
        return "the prompt is empty: there is no KV of it to hand over"
    ids = np.asarray(tokens)
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if not wrong.size:
        return ""
    return f"token {wrong[0]} in the prompt: the model's vocabulary has 0 to {vocabulary - 1}"


def logprobs_problem(req: Any, most: int) -> str:
    """Why the first token's log probabilities cannot be handed over; empty if they can. Without room for them
    SGLang raises in its loop, and the prefill engine ends."""
    if not req.return_logprob or req.logprob.top_logprobs_num <= most:
        return ""
    requested = req.logprob.top_logprobs_num
    return f"top_logprobs_num {requested}: must be at most {most} with separate prefill and decode engines"


def refuse(req: Any, problem: str, scheduler: Any) -> None:
    """End a request that has not entered a queue, with status 400. SGLang's own function ends it, so that, for example,
    the request's session does not wait for it."""
    req.set_finish_with_abort(problem)
    scheduler.retire_unadmitted_request(req)
