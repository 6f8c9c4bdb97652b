# SPDX-License-Identifier: Apache-2.0
"""Audits each pair of engines before users come: one small test prompt is computed on both sides.

A decode engine computes all prompts itself until an audit of their prefill engine has passed (docs/trust.md#audit).
Otherwise the first user's prompt would be audited, and all prompts that come meanwhile would be computed twice. Pairs
that exist only after a change of roles are audited before it, because roles change when engines are busy.
"""

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from pd_connector.protocol.wire import about
from pd_connector.protocol.wire.audit_prompt import audit_body, fresh_salt
from pd_connector.protocol.wire.params import ProducerAddress, prefill_params
from pd_connector.remedies import remedy_of, unread_in
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.exchange import EngineCall
from scheduler_plugins.router.engines.failures import about_key
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.ranks import sent_to
from scheduler_plugins.router.engines.traffic import read
from scheduler_plugins.router.loop import is_behind, ran_s
from scheduler_plugins.router.prompt.transfer import probe
from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0
"""Longest wait for an answer. The prompt waits behind the engine's other work."""
_LEAST_CONTEXT = 256
"""Tokens of the smallest context that the prompt certainly fits in."""
_OURS = "pd_connector:audits"
"""A metric that only an engine which audits has: our connector, unless `audit` is `off`."""
VERDICT_S = 10.0
"""Longest wait for the verdict, once both engines have answered. An engine whose audits have all passed gives none."""
_MOST_PROMPTS = 4
"""Most prompts of one pair. KV may come by two paths (`codec: auto`), each of which is audited, and an audit may end
without a verdict."""

PATIENCE_S = 5.0
"""A pair of the future waits this long for its engines to be idle, and is then audited beside their work."""

_COUNTED = re.compile(r'^pd_connector:audits_total{.*?cause="(\w+)".*?} (\S+)', re.MULTILINE)
_PASSED, _WRONG = "passed", "audit"
_LOOK_S = 0.5

Key = tuple[ProducerAddress, int, str, int, int]


class _Pair(NamedTuple):
    """A rank of a prefill engine, and a rank of a decode engine."""

    prefill: BackendEngine
    rank: int
    decode: BackendEngine
    decode_rank: int
    future: bool
    """Whether an engine must change its role first."""

    @property
    def key(self) -> Key:
        """Identifies the pair. The key changes when either engine restarts."""
        prefill, decode = self.prefill, self.decode
        address = prefill.addresses[self.rank]
        return address, prefill.starts, decode.url, self.decode_rank, decode.starts

    @property
    def busy(self) -> bool:
        return bool(self.prefill.copies) or any(e.in_flight for e in (self.prefill, self.decode))


def _may(engine: BackendEngine, side: Role) -> bool:
    """Whether the controller may move the engine to this side."""
    return bool({side, Role.BOTH} & engine.role_state.place.may & engine.able)


def _is_future(prefill: BackendEngine, decode: BackendEngine) -> bool:
    return not (prefill.hands_over and decode.serves(Role.DECODE))


def _say(where: str, verdict: str, again: bool) -> None:
    """Log a verdict, and what to do if the pair will not use KV."""
    if again or verdict in ("", _PASSED):
        text = verdict or "no audit followed: another prompt's has passed, or audits are off"
        logger.info("%s: test prompt for the audit: %s", where, text)
        return
    logger.warning(
        "%s: no audit has passed (%s), so the decode engine computes the prompts itself. What to do: %s. "
        "The decode engine's log says more.",
        where,
        verdict,
        remedy_of(verdict),
    )


class PairAudits:
    """Sends each pair its prompts, one pair after the other, once per start of the two engines. A pair gets another
    prompt if KV can come by another path, and if an audit has ended without a verdict.

    The prompts are not users' requests: no metric and no load of the router counts them.
    """

    def __init__(
        self,
        engines: Callable[[], list[BackendEngine]],
        config: Callable[[], RouterConfig],
        session: aiohttp.ClientSession,
    ) -> None:
        """Start nothing yet. `engines` and `config` return the current engines and settings."""
        self._engines = engines
        self._config = config
        self._session = session
        self._done: set[Key] = set()
        self._waiting: dict[Key, float] = {}  # since when a pair has waited for idle engines
        self._prompts: Counter[Key] = Counter()  # sent so far

    async def run(self) -> None:
        """Audit until cancelled."""
        while True:
            pairs = list(self._pairs())
            present = {pair.key for pair in pairs}
            self._done &= present
            self._waiting = {key: at for key, at in self._waiting.items() if key in present}
            self._prompts = Counter(
                {key: sent for key, sent in self._prompts.items() if key in present}
            )
            for pair in pairs:
                with suppress(LookupError):  # an address may be gone by now
                    if pair.key not in self._done and not self._waits(pair):
                        await self._try(pair)
            await asyncio.sleep(self._config().health_interval_s)

    def _waits(self, pair: _Pair) -> bool:
        """Whether the pair's prompt should wait for idle engines."""
        if not pair.busy:
            return False
        now = asyncio.get_running_loop().time()
        since = self._waiting.setdefault(pair.key, now)
        return not pair.future or now - since < PATIENCE_S

    def _pairs(self) -> Iterator[_Pair]:
        """Pairs that exist, then pairs that a change of roles may make."""
        up = [e for e in self._engines() if e.up and not e.draining and e.kind is Kind.VLLM]
        prefills = [engine for engine in up if engine.hands_over or _may(engine, Role.PREFILL)]
        takes = [engine for engine in up if not engine.only_produces]
        decodes = [e for e in takes if e.serves(Role.DECODE) or _may(e, Role.DECODE)]
        both = itertools.product(prefills, decodes)
        for prefill, decode in sorted(both, key=lambda pair: _is_future(*pair)):
            same = not decode.models or prefill.model in decode.models
            fits = all(
                e.context_tokens == 0 or e.context_tokens >= _LEAST_CONTEXT
                for e in (prefill, decode)
            )
            if same and fits and prefill.url != decode.url:
                places = range(len(prefill.addresses)), range(len(decode.ranks))
                for rank, decode_rank in itertools.product(*places):
                    yield _Pair(prefill, rank, decode, decode_rank, _is_future(prefill, decode))

    async def _try(self, pair: _Pair) -> None:
        """Send a prompt, and wait for the verdict. Without an error, the pair gets more prompts until one is not
        audited any more."""
        key, where = pair.key, f"{pair.prefill.url} to {pair.decode.url}"
        self._done.add(key)
        try:
            async with asyncio.timeout(2 * _LIMIT_S + VERDICT_S):
                before = await self._verdicts(pair.decode)
                if before is None:
                    return
                if await self._reads(pair.prefill) or await self._reads(pair.decode):
                    self._done.discard(key)
                    return
                self._prompts[key] += 1
                await self._send(pair)
                verdict = await self._verdict(pair.decode, before)
                again = verdict not in ("", _WRONG) and self._prompts[key] < _MOST_PROMPTS
                if again:
                    self._done.discard(key)
                _say(where, verdict, again)
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            said = str(error) or "no answer in time"
            level = logging.WARNING if "--api-key" in said else logging.INFO
            logger.log(level, "%s: the audit with a test prompt cannot run: %s", where, said)
        except Exception:
            logger.exception("%s: the audit with a test prompt failed", where)

    async def _metrics(self, engine: BackendEngine) -> str:
        async with self._session.get(f"{engine.url}/metrics") as answer:
            return await answer.text()

    async def _reads(self, engine: BackendEngine) -> bool:
        """Whether the engine still reads its weights, so that it hands nothing over."""
        return bool(unread_in(read(await self._metrics(engine), 0.0).totals))

    async def _verdicts(self, decode: BackendEngine) -> Counter[str] | None:
        """The engine's audits so far, by verdict. None if it has not our connector; other connectors audit nothing."""
        text = await self._metrics(decode)
        if _OURS not in text:
            return None
        verdicts: Counter[str] = Counter()
        for cause, count in _COUNTED.findall(text):
            verdicts[cause] += int(float(count))
        return verdicts

    async def _verdict(self, decode: BackendEngine, before: Counter[str]) -> str:
        """The cause with which the audit of a prompt has ended; empty if there was none."""
        until_s = ran_s() + VERDICT_S
        while True:
            new = (await self._verdicts(decode) or Counter()) - before
            if new or (ran_s() >= until_s and not is_behind()):
                return _WRONG if _WRONG in new else next(iter(new), "")
            await asyncio.sleep(min(_LOOK_S, VERDICT_S))

    async def _send(self, pair: _Pair) -> None:
        """Send the prompt to the prefill engine, then to the decode engine with the prefill engine's answer. It is as long as
        the decode engine needs it: states of recurrent layers can be compared after a whole page only."""
        model, salt = pair.prefill.model, fresh_salt()
        described = await self._ask(pair.decode, pair.decode_rank, probe(model))
        tokens = about.read(described.get("kv_transfer_params")).audit_tokens
        body = audit_body(model, prefill_params(), salt, tokens)
        answer = await self._ask(pair.prefill, pair.rank, body)
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict):
            raise ValueError("the prefill engine hands over no KV")
        body = audit_body(model, params, salt, tokens)
        await self._ask(pair.decode, pair.decode_rank, body)

    async def _ask(
        self, engine: BackendEngine, rank: int, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := self._config().api_key:
            headers["Authorization"] = f"Bearer {key}"
        call = EngineCall("POST", "/v1/completions", headers, (msgspec.json.encode(body),))
        if len(engine.ranks) > 1:
            call = sent_to(call, rank)
        timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
        async with self._session.post(
            engine.url + call.path,
            data=b"".join(call.body or ()),
            headers=call.headers,
            timeout=timeout,
        ) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise ValueError(f"{engine.url} answered {answer.status}{about_key(answer.status)}")
        content = msgspec.json.decode(raw)
        return content if isinstance(content, dict) else {}
