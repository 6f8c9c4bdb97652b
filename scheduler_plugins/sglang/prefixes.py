# SPDX-License-Identifier: Apache-2.0
"""The cached prefixes of waiting prompts in SGLang's radix cache, in the form that the queue uses.

The queue asks whether a hash is cached, and a hash stands for the beginning of a prompt. SGLang's tree has no hashes: a
look-up takes tokens, and returns the number of them that are cached. So a prompt is cut into `Grain`s. The first grain
that the queue asks for makes one look-up in the tree, which answers for all grains of the prompt. Answers are valid for
one step.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import Any

from sglang.srt.mem_cache.common import match_kv_cache

_TOKENS = 32
"""The least number of tokens of a grain. Shorter shared prefixes are not worth waiting for, as in SGLang's own policies
(`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`)."""


def grain_tokens(page_size: int) -> int:
    """Tokens of a grain. They are whole pages, because the tree shares whole pages."""
    return page_size * max(1, -(-_TOKENS // page_size))


class Grain:
    """A prompt up to the end of one of its grains. Equal grains mean equal prefixes."""

    __slots__ = ("_value", "request_id")

    def __init__(self, value: int, request_id: str) -> None:
        self._value = value
        self.request_id = request_id

    def __hash__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grain) and self._value == other._value


class PrefixView:
    """The grains that a request would find if it started now. A container, as `PrefixIndex` needs it."""

    def __init__(self, tree_cache: Any, page_size: int) -> None:
        """`tree_cache`: SGLang's tree; a disabled tree is empty."""
        self._tree = tree_cache
        self.enabled = not getattr(tree_cache, "disable", True)
        self.page_size = grain_tokens(page_size)
        """Tokens of a grain."""
        self._prompts: dict[str, tuple[Any, Sequence[Grain]]] = {}
        self._cached: dict[Grain, bool] = {}
        self.looked_up: list[str] = []
        """Ids of the requests whose prompts were looked up in this step, in order.

        A look-up marks nodes as used, which changes SGLang's evictions. The trees of all ranks must stay equal, so the
        other ranks repeat these look-ups."""

    def begin(self) -> None:
        """Called when a step begins. Earlier answers may be outdated."""
        self._cached = {}
        self.looked_up = []

    def add(self, req: Any) -> Sequence[Grain]:
        """Cut a waiting request's prompt into grains. An incomplete last grain is left out."""
        grains = cut(req, self.page_size) if self.enabled else ()
        self._prompts[req.rid] = req, grains
        return grains

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self._prompts.pop(request_id, None)

    def retain(self, request_ids: Container[str]) -> None:
        """Forget all requests but these."""
        self._prompts = {
            request_id: kept
            for request_id, kept in self._prompts.items()
            if request_id in request_ids
        }

    def __len__(self) -> int:
        return len(self._prompts)

    def grains(self, request_id: str) -> Sequence[Grain]:
        """The grains of a request that was added and not forgotten; otherwise none."""
        return self._prompts[request_id][1] if request_id in self._prompts else ()

    def __contains__(self, grain: object) -> bool:
        assert isinstance(grain, Grain)
        cached = self._cached.get(grain)
        if cached is None:
            self._look_up(grain.request_id)
            cached = self._cached[grain]
        return cached

    def _look_up(self, request_id: str) -> None:
        req, grains = self._prompts[request_id]
        self.looked_up.append(request_id)
        match_kv_cache(req, self._tree)
        cached = req.num_matched_prefix_tokens // self.page_size
        for grain in grains[:cached]:
            self._cached[grain] = True
        for grain in grains[cached:]:
            # Another request may be allowed to use more of the same prompt than this request.
            self._cached.setdefault(grain, False)


def cut(req: Any, tokens: int) -> Sequence[Grain]:
    """The grains of a request of SGLang. Every grain includes the request's adapter and salt."""
    ids = array("q", [*req.origin_input_ids, *req.output_ids])
    value, grains = hash((req.extra_key, req.cache_salt)), []
    for end in range(tokens, len(ids) + 1, tokens):
        value = hash((value, ids[end - tokens : end].tobytes()))
        grains.append(Grain(value, req.rid))
    return tuple(grains)
