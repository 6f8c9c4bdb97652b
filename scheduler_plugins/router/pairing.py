# SPDX-License-Identifier: Apache-2.0
"""Which engines may answer one request together, and which alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_plugins.router import body
from scheduler_plugins.router.engines import BackendEngine
from scheduler_plugins.router.handoff import why_one_kind
from scheduler_plugins.router.kinds import Kind


class Pairing:
    """What one request allows, and what it has met.

    Attributes:
        no_prefill: prefill engines that have failed the request's copy.
        failed: pairs, prefill and decode, whose decode engine has not got the KV.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.no_prefill: set[BackendEngine] = set()
        self.failed: set[tuple[BackendEngine, BackendEngine]] = set()
        self._alone = body.why_not_disaggregated(request)
        self._one_kind = {kind: why_one_kind(request, kind) for kind in Kind}

    def able(
        self, decode: BackendEngine, prefill: Sequence[BackendEngine]
    ) -> tuple[list[BackendEngine], str]:
        """The prefill engines that can work with this decode engine.

        Returns:
            Those engines, and why there is none; the latter is empty if there are any.
        """
        if self._alone is not None and decode.computes_prompts:
            return [], self._alone
        known = [engine for engine in prefill if engine.address is not None]
        left = [
            engine
            for engine in known
            if engine not in self.no_prefill and (engine, decode) not in self.failed
        ]
        kind = decode.kind or Kind.VLLM
        unlike = self._alone or self._one_kind[kind]
        found = [e for e in left if (e.kind or Kind.VLLM) is kind or unlike is None]
        if found:
            return found, ""
        if left:
            return [], str(unlike)
        if len(left) < len(known):
            return [], "prefill_refused"
        return [], "no_address" if prefill else "no_prefill"

    def answering(
        self, decode: Sequence[BackendEngine], prefill: Sequence[BackendEngine]
    ) -> list[BackendEngine]:
        """The decode engines that can answer, with a prefill engine or alone. Engines that compute
        prompts themselves come before pairs where the request should not be cut in two."""
        alone = [engine for engine in decode if engine.computes_prompts]
        if self._alone is not None and alone:
            return alone
        return [e for e in decode if e.computes_prompts or self.able(e, prefill)[0]]

    def alone(self, prefill: Sequence[BackendEngine]) -> list[BackendEngine]:
        """The prefill engines that can answer without a decode engine."""
        return [engine for engine in prefill if engine.computes_prompts]

    def why_not(self, decode: Sequence[BackendEngine], prefill: Sequence[BackendEngine]) -> str:
        """Why none of these decode engines can answer."""
        return self.able(decode[0], prefill)[1] if decode else "no_decode"
