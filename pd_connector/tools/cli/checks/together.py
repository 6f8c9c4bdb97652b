# SPDX-License-Identifier: Apache-2.0
"""Whether engines that were visited can pass KV to each other: wire schemas, models and contexts."""

from collections.abc import Sequence
from typing import NamedTuple

from pd_connector.kv.model import draft_problem, model_problem, unread_problem
from pd_connector.protocol.wire.about import About, apart
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "engines together"
_HERE = "pd-connector here"


class Told(NamedTuple):
    """What one engine with PDConnector says of itself."""

    url: str
    about: About
    produces: bool
    model: str  # the name under which it serves its model
    tokens: tuple[object, ...] = ()  # of a text and of a chat; None where it does not say
    context: int = 0  # tokens of the longest prompt with its answer; 0: not said


def check(engines: Sequence[Told]) -> list[Finding]:
    """All findings about engines of one setup. Each is compared with the first prefill engine among them, or with the
    first engine."""
    if len(engines) < 2:
        return []
    first = next((one for one in engines if one.produces), engines[0])
    compared = [_compare(first, one) for one in engines if one is not first]
    findings = [finding for finding in compared if finding is not None]
    if not findings:
        found = f"{len(engines)} engines serve {first.model} and speak wire schema {first.about.schemas}"
        if any(one.about.model is None for one in engines):
            found += (
                "; their weights were not compared: a version of pd-connector does not tell them"
            )
        findings = [Finding(AREA, "models", Status.OK, found)]
    drafts = [_drafts(one, other) for one in engines for other in engines if one is not other]
    return [*findings, *(one for one in drafts if one is not None), *_contexts(engines)]


def schema(url: str, here: About, there: About) -> list[Finding]:
    """Whether the engine at `url` and one of this installation could speak to each other."""
    problem = _schema_problem(_HERE, here, url, there)
    return [Finding(url, "wire schema", Status.FAIL, *problem)] if problem else []


def _compare(first: Told, other: Told) -> Finding | None:
    ours, theirs = first.about, other.about
    if problem := _schema_problem(first.url, ours, other.url, theirs):
        return Finding(AREA, "wire schema", Status.FAIL, *problem)
    if ours.model is not None and theirs.model is not None:
        if text := unread_problem(ours.model, theirs.model):
            text = text.replace("the producer", first.url).replace("the consumer", other.url)
            advice = "no KV passes until then: try again in a while (a pd-connector of before never says that it has)"
            return Finding(AREA, "models", Status.WARN, text, advice)
        text = model_problem(ours.model, theirs.model)
        text = text.replace("the producer", first.url).replace("the consumer", other.url)
        if text:
            advice = (
                f"no KV passes between {first.url} and {other.url} until both serve the same model"
            )
            return Finding(AREA, "models", Status.FAIL, text, advice)
    for what, flag, one, two in zip(
        ("text", "chat"),
        ("--tokenizer", "--chat-template"),
        first.tokens,
        other.tokens,
        strict=False,
    ):
        if one and two and one != two:
            found = f"{first.url} and {other.url} make unlike tokens of the same {what}"
            advice = f"give both engines the same {flag}: KV of a prompt is of no use to an engine that reads other tokens"
            return Finding(AREA, "tokenizers", Status.FAIL, found, advice)
    if first.model != other.model:
        found = f"{first.url} serves {first.model}, {other.url} serves {other.model}"
        advice = (
            "a router pairs engines of one name only: give both engines the same model and the same "
            "--served-model-name, or name one setup at a time"
        )
        return Finding(AREA, "models", Status.WARN, found, advice)
    return None


def _drafts(source: Told, target: Told) -> Finding | None:
    """Whether an engine that drafts takes no KV from another one, which does not have its draft model."""
    ours, theirs = source.about.model, target.about.model
    if not source.produces or ours is None or theirs is None or not theirs.draft:
        return None
    if unread_problem(ours, theirs):
        return None
    if not (problem := draft_problem(ours, theirs)):
        return None
    text = problem.replace("the producer", source.url).replace("the consumer", target.url)
    advice = f"no KV passes from {source.url} to {target.url}, by a handoff or a pool, until both draft alike, or neither does"
    return Finding(AREA, "drafts", Status.WARN, text, advice)


def _contexts(engines: Sequence[Told]) -> list[Finding]:
    """Whether all engines take prompts of the same length."""
    said = [one for one in engines if one.context]
    if len({one.context for one in said}) < 2:
        return []
    found = ", ".join(f"{one.url} takes {one.context:,} tokens" for one in said)
    least = min(one.context for one in said)
    advice = (
        f"give all the same --max-model-len (SGLang: --context-length), or keep requests within {least:,} tokens. pd-router sends a "
        "longer one where it fits; other proxies get status 400 for it"
    )
    return [Finding(AREA, "contexts", Status.WARN, found, advice)]


def _schema_problem(name: str, ours: About, other: str, theirs: About) -> tuple[str, str] | None:
    older = apart(ours, theirs)
    if older is None:
        return None
    both = ((name, ours), (other, theirs))
    told = ", ".join(f"{who} speaks {it.schemas} ({it.version or 'older'})" for who, it in both)
    behind = name if older else other
    upgrade = behind if behind == _HERE else f"pd-connector at {behind}"
    found = f"no common wire schema: {told}: no KV passes between the two"
    return found, f"upgrade {upgrade}; one schema apart works"
