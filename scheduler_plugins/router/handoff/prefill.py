# SPDX-License-Identifier: Apache-2.0
"""The prefill side of one attempt: a copy of the request, sent at the same time as the decode engine's."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from pd_connector.errors import HANDOFF_FAILED
from pd_connector.protocol.wire.prefill_server import PrefillServer
from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.client.answers import ABORTED
from scheduler_plugins.router.engines.completion import status_of
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import (
    EngineCall,
    ResponseTimeouts,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.engines.failures import (
    EngineFailedError,
    OverloadedError,
    RefusedError,
    ended_early,
)
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.ranks import sent_to
from scheduler_plugins.router.handoff.engine_bodies import Prefill
from scheduler_plugins.router.handoff.first_token import FirstLogprobs, first_logprobs
from scheduler_plugins.router.handoff.usage import PromptUsage, UsagePatch, prompt_usage
from scheduler_plugins.router.loop import ran_s
from scheduler_plugins.router.policies.base import BlockHash
from scheduler_plugins.router.prompt import transfer
from scheduler_plugins.router.prompt.body import ONLY_VLLM, PAIRED
from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

REFUSAL_GRACE_S = 1.0
"""Time that a decode engine without its KV has to answer all the same. It answers at once if it has the prompt cached;
otherwise it waits for KV that never comes, and so does the client."""
_LACKS = (403, 404)
"""Statuses of an engine that lacks an endpoint: vLLM without the option for it, and older vLLM."""
USAGE_S = 1.0
"""Longest wait for the prefill engine's count of cached tokens, after the decode engine's count has come."""


def prefill_side(engine: BackendEngine, rank: int | None) -> Prefill:
    """Description of a prefill engine, from which its decode engine can fetch KV.

    Args:
        rank: data-parallel rank that will compute the prompt; None: not known in advance.
    """
    addresses = engine.addresses if rank is None else engine.addresses[rank : rank + 1]
    kind = engine.kind or Kind.VLLM
    server = PrefillServer(engine.url, rank) if kind is Kind.VLLM else None
    return Prefill(kind, engine.model, addresses, engine.bootstrap(rank or 0), server)


class PrefillCopy:
    """A request that runs on a prefill engine during the `async with` block.

    Leaving the block cancels the request if it still runs. The KV goes to the decode engine directly. The answer is
    used only for `first_logprobs` and the count of cached tokens.
    """

    def __init__(
        self,
        engine: BackendEngine,
        call: EngineCall,
        rank: int | None,
        pool: EnginePool,
        connections: EngineConnections,
        config: RouterConfig,
        tokens: int,
        fresh_tokens: int,
        prompt: Sequence[BlockHash],
        elsewhere: Callable[[], bool],
    ) -> None:
        """Send nothing yet.

        Args:
            rank: index of the engine's data-parallel rank, if it has several.
            tokens: length of the prompt.
            fresh_tokens: tokens that the engine is expected to compute.
            prompt: blocks of the prompt. The engine has them cached afterwards.
            elsewhere: returns whether another prefill engine can be used.
        """
        self.engine = engine
        self.failure: EngineFailedError | None = None
        self.top_logprobs = -1
        """Number of likeliest first tokens that the client wants; -1: no log probabilities."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the copy has failed; see `Companion`."""
        self.on_end: Callable[[EngineFailedError | None], None] = lambda failure: None
        """Called when the engine has answered, or has failed."""
        self.answered = False
        """Whether the engine has computed the prompt."""
        self._failed_at = 0.0
        self._answer: FirstLogprobs | None = None
        self._usage: PromptUsage | None = None
        self._id = uuid.uuid4().hex
        self._call = call if rank is None else sent_to(call, rank)
        self._rank = rank or 0
        self._pool = pool
        self._connections = connections
        self._config = config
        self._tokens = tokens
        self._fresh_tokens = fresh_tokens
        self._prompt = prompt
        self._elsewhere = elsewhere

    async def __aenter__(self) -> "PrefillCopy":
        engine, now = self.engine, asyncio.get_running_loop().time()
        engine.circuit.sent()
        queued_s, cost_s = engine.queued_s(now), engine.costs.prefill_s(self._fresh_tokens)
        self._alone = queued_s == 0.0
        self._begun_at = now
        self._expected_s = queued_s + cost_s if engine.costs.known else 0.0
        engine.load.prefill_sent(self._id, self._fresh_tokens, cost_s, now)
        engine.copies[self._id] = self._rank
        engine.copies_sent[self._rank] += 1
        self._task = asyncio.create_task(self._run(), name=f"prefill copy {self.engine.url}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        if error is not None:  # wait, so a failure is noted before `failure` is read
            await asyncio.gather(self._task, return_exceptions=True)
        # Do not wait after a complete answer. A client with a single request may close its connection now. That
        # cancels this task, and the client would count as gone.
        self.engine.circuit.given_up()
        self._ended()  # a task that is cancelled before its first step does not call it
        if error is None and self.failure is None:
            # The decode engine has answered, so the prompt was computed, even without the prefill engine's answer.
            self._prefilled()

    @property
    def lends(self) -> bool:
        """Whether the decode engine's answer lacks `first_logprobs`."""
        return self.top_logprobs >= 0

    async def first_logprobs(self) -> FirstLogprobs:
        """Log probabilities of the first token, from the prefill engine's answer. Raises EngineFailedError if it has
        none."""
        await self._task
        if self._answer is None:
            raise EngineFailedError("no_logprobs", "the prefill engine sent no log probabilities")
        return self._answer

    async def usage_patch(self, decode: Kind | None) -> UsagePatch | None:
        """The correction of the decode engine's count of cached tokens; None if the count is right."""
        await asyncio.wait({self._task}, timeout=USAGE_S)
        if self.failure is not None and not self.failure.accepted:
            return None  # the prefill engine computed nothing, so nothing was handed over
        usage = self._usage or PromptUsage()
        if usage.cached is None and decode is Kind.SGLANG:
            return None  # its prefill engine sends the count with the KV
        return UsagePatch(usage)

    def refused(self, now: float) -> EngineFailedError | None:
        """Why the KV will never come; None if it may still come.

        If a prefill engine dies, its session ends and the decode engine notices. It computes the prompt itself,
        unless another prefill engine can. If a living prefill engine never took the copy, the decode engine waits for
        a transfer that does not exist. There is no reason to wait if the prefill engine was overloaded or refused the
        prompt. Otherwise the decode engine has `REFUSAL_GRACE_S` to find the KV in its own cache, or to answer
        anyway.

        If the prefill engine computed the prompt and only the handoff failed, the decode engine knows that, and
        continues by itself: vLLM computes the prompt, SGLang has it computed once more. If it cannot, its answer is an
        error.
        """
        if self.failure is None or isinstance(self.failure, HandoffFailedError):
            return None
        if self.failure.accepted and not self._elsewhere():
            return None
        if isinstance(self.failure, OverloadedError | RefusedError):
            return PrefillRefusedError(self.failure)
        if now - self._failed_at < REFUSAL_GRACE_S:
            return None
        return PrefillRefusedError(self.failure)

    async def _run(self) -> None:
        try:
            await self._send()
        except EngineFailedError as failure:
            if HANDOFF_FAILED in str(failure):
                self._fail(HandoffFailedError(failure))
                return
            self._fail(failure)
            if not isinstance(failure, OverloadedError) and not failure.blames_request:
                self._pool.report_failure(self.engine, failure)
        except Exception as error:
            logger.exception("the prefill copy to %s failed", self.engine.url)
            self._fail(EngineFailedError("internal", repr(error)))
        finally:
            self._ended()

    def _ended(self) -> None:
        self.on_end(self.failure)
        self.engine.copies.pop(self._id, None)
        self.engine.load.prefill_ended(self._id, asyncio.get_running_loop().time())

    async def _send(self) -> None:
        # The decode side's limits end this block, so the copy only needs checks that the engine is alive.
        limit_s = self._config.answer_timeout_s
        timeouts = ResponseTimeouts(limit_s, self._config.idle_timeout_s)
        async with exchange(
            self._connections,
            self.engine,
            self._call,
            timeouts,
            self._config,
            expected_s=self._expected_s,
        ) as answer:
            if answer.status in _LACKS and self._call.path in ONLY_VLLM:
                raise RefusedError(answer.status, await answer.read_all())
            await raise_for_status(answer, only=200)
            raw = await answer.read_all()
            kind = answer.headers.get("Content-Type", "")
        status = await status_of(200, kind, raw, completes=self._call.path in PAIRED)
        if status != 200:
            raise EngineFailedError(f"status_{status}", f"{status}: {raw!r:.300}", accepted=False)
        try:
            answer = msgspec.json.decode(raw)
        except (ValueError, RecursionError):
            raise EngineFailedError("malformed", "its answer is not JSON") from None
        if ABORTED in raw:
            raise ended_early()
        self.answered = True
        self._answer = first_logprobs(answer, max(0, self.top_logprobs))
        self._usage = prompt_usage(answer)
        self._count_hits(self._usage)
        self.engine.circuit.succeeded()
        seen = transfer.address_in(answer)
        if seen is not None and self.engine.moved(self._rank, seen):
            self._pool.confirm(self.engine, self._rank, seen)
            why = f"its KV is at {seen.host}:{seen.port}, but the decode engine got another address"
            raise EngineFailedError("moved", why, accepted=False)
        if self._alone and self.engine.prefills == 1:
            took_s = asyncio.get_running_loop().time() - self._begun_at
            cached = self._tokens - self._fresh_tokens
            self._pool.learnt(self.engine, StepLoad.of([(cached, self._tokens)]), took_s)
        self._prefilled()

    def _count_hits(self, usage: PromptUsage) -> None:
        """Compare the index's expectation with the cached tokens that the engine reports."""
        if usage.cached is None:
            return
        # The router's own length of a text is a guess. A guess below the engine's count would make shares above 1.
        tokens = max(usage.tokens or self._tokens, usage.cached)
        expected = max(0, self._tokens - self._fresh_tokens) / self._tokens
        metrics = self.engine.metrics
        metrics.cached_tokens.labels("expected").inc(expected * tokens)
        metrics.cached_tokens.labels("actual").inc(usage.cached)
        metrics.counted_prompt_tokens.inc(tokens)

    def _prefilled(self) -> None:
        """Note that the engine has cached the prompt."""
        prompt, self._prompt = self._prompt, ()
        self._pool.prefilled(self.engine, prompt)

    def _fail(self, failure: EngineFailedError) -> None:
        self.failure = failure
        self._failed_at = ran_s()
        self.on_failure()


class HandoffFailedError(EngineFailedError):
    """The prefill engine computed the prompt, and its KV did not pass. The prefill engine is not to blame."""

    def __init__(self, failure: EngineFailedError) -> None:
        super().__init__("handoff", str(failure), accepted=False)


class PrefillRefusedError(EngineFailedError):
    """The prefill engine refused its copy, or died with it. The decode engine is not to blame."""

    def __init__(self, failure: EngineFailedError) -> None:
        super().__init__(
            "prefill_refused", f"the prefill engine failed its copy: {failure}", accepted=False
        )
