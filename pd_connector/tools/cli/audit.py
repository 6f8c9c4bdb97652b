# SPDX-License-Identifier: Apache-2.0
"""`pd-connector audit`: has pairs of engines compare a prompt before users come, and reports the result."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from pd_connector.errors import Cause
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire.audit_prompt import audit_body, fresh_salt
from pd_connector.protocol.wire.params import describe_params, prefill_params
from pd_connector.remedies import remedy_of
from pd_connector.tools.cli.app import fail
from pd_connector.tools.cli.checks.asking import (
    Ask,
    PeerError,
    SilentPeerError,
    asker,
    json_of,
    url_of,
)

VERDICT_S = 20.0
"""Longest wait for the end of an audit, in seconds."""
_ROUNDS = 4
"""Most prompts: each path of a pair is audited by itself, and one more shows that KV is used."""
_LOOK_S = 0.5
_AUDITS = "pd_connector:audits_total"
_RECEIVED = "pd_connector:received_transfers_total"


class Engine(NamedTuple):
    """An engine that the user named."""

    url: str
    ask: Ask
    model: str
    hands_over: bool
    audit_tokens: int
    """See `About`."""


class Verdict(NamedTuple):
    """The result for a pair."""

    good: bool
    said: str


def audit(
    peers: Annotated[
        list[str],
        typer.Option("--peer", metavar="URL", help="A vLLM engine. Name both sides of each pair."),
    ],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY", help="Key of the engines' HTTP interface.", show_default=False
        ),
    ] = None,
) -> None:
    """Have every pair of these engines compare one prompt, and print the verdict.

    Ends with status 1 if a pair does not pass.
    """
    engines, silent = list[Engine](), list[str]()
    for peer in peers:
        try:
            url = url_of(peer)
            engines.append(look(url, named(url, asker(url, api_key))))
        except PeerError as error:
            silent.append(str(error))
    if silent:
        fail("\n        ".join(silent))
    pairs = list(pairs_of(engines))
    if not pairs:
        fail("no pair among these engines: name one that prefills and one that decodes (--peer)")
    console, good = Console(soft_wrap=True), True
    for prefill, decode in pairs:
        verdict = judge(prefill, decode)
        good &= verdict.good
        line = (
            f"{'pass' if verdict.good else 'fail'}  {prefill.url} to {decode.url}: {verdict.said}"
        )
        console.print(line, markup=False, highlight=False)
    if not good:
        raise typer.Exit(1)


def named(url: str, ask: Ask) -> Ask:
    """Ask so that an error names the engine."""

    def ask_named(path: str, body: Mapping[str, Any] | None) -> str:
        try:
            return ask(path, body)
        except SilentPeerError as error:
            remedy = "is the engine up, and is this the URL of its HTTP server (--peer)?"
            raise PeerError(f"{url}{error}: {remedy}") from None
        except PeerError as error:
            raise PeerError(f"{url}: {error}") from None

    return ask_named


def look(url: str, ask: Ask) -> Engine:
    """Ask an engine for its role. Raises PeerError."""
    try:
        model = str(json_of(ask("/v1/models", None))["data"][0]["id"])
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        answer = _post(ask, {**body, "kv_transfer_params": describe_params()})
    except (ValueError, LookupError, TypeError) as error:
        raise PeerError(f"{url} does not answer as a vLLM engine: {error!r}") from None
    params = answer.get("kv_transfer_params")
    params = params if isinstance(params, dict) else {}
    return Engine(url, ask, model, bool(params.get("describe")), about.read(params).audit_tokens)


def pairs_of(engines: Sequence[Engine]) -> Iterator[tuple[Engine, Engine]]:
    """Pairs of each engine that hands KV over with each engine that fetches KV, preferably with engines that only
    fetch."""
    only = [engine for engine in engines if not engine.hands_over]
    for prefill, decode in permutations(engines, 2):
        if prefill.hands_over and (decode in only or not only):
            yield prefill, decode


def judge(prefill: Engine, decode: Engine, sleep: Callable[[float], None] = time.sleep) -> Verdict:
    """Send prompts through a pair until KV is used, or an audit fails."""
    try:
        for _ in range(_ROUNDS):
            ended = _round(prefill, decode, sleep)
            if ended == "used":
                return Verdict(True, "audits have passed, and KV is used")
            if ended == "audit":
                return Verdict(
                    False, "the KV is not what the decode engine computes: its log says where"
                )
            if ended != "passed":
                break
    except (PeerError, ValueError, TypeError) as error:
        return Verdict(False, str(error) or repr(error))
    if ended not in list(Cause):
        return Verdict(False, f"no verdict ({ended}): the decode engine's log says why")
    do = remedy_of(ended)
    return Verdict(False, f"no verdict ({ended}): {do}; the decode engine's log says more")


def _round(prefill: Engine, decode: Engine, sleep: Callable[[float], None]) -> str:
    """The end of one prompt: `used`, `passed`, or the cause of an audit that did not pass."""
    before, salt, tokens = _counts(decode), fresh_salt(), decode.audit_tokens
    answer = _post(prefill.ask, audit_body(prefill.model, prefill_params(), salt, tokens))
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise PeerError(f"{prefill.url} hands no KV over")
    _post(decode.ask, audit_body(decode.model, params, salt, tokens))
    for _ in range(int(VERDICT_S / _LOOK_S)):
        now = _counts(decode)
        grown = [cause for cause, count in now.items() if count > before.get(cause, 0.0)]
        for ended in ("audit", "used", "passed", *grown):
            if ended in grown:
                return ended
        sleep(_LOOK_S)
        # The engine reports metrics only with a step.
        _post(decode.ask, {"model": decode.model, "prompt": "a", "max_tokens": 1})
    return "it neither used the KV nor compared it"


def _counts(decode: Engine) -> dict[str, float]:
    """Ended audits by cause, and transfers that were used."""
    counts: dict[str, float] = {}
    for line in decode.ask("/metrics", None).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(_AUDITS):
            cause = name.partition('cause="')[2].partition('"')[0]
        elif name.startswith(_RECEIVED):
            cause = "used"
        else:
            continue
        counts[cause] = counts.get(cause, 0.0) + float(value)
    return counts


def _post(ask: Ask, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = json_of(ask("/v1/completions", body))
    return answer if isinstance(answer, dict) else {}
