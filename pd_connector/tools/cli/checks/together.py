# SPDX-License-Identifier: Apache-2.0
"""Whether engines that were visited can pass KV to each other: wire schemas, models and contexts."""

from collections.abc import Sequence
from typing import NamedTuple

from pd_connector.kv.model import draft_problem, model_problem, unread_problem
from pd_connector.protocol.wire.about import About, apart
from pd_connector.tools.cli.checks.finding import Finding, Status

AREA = "engines together"
_HERE = "pd-connector here"


class EngineReport(NamedTuple):
    """What one engine with PDConnector reports about itself."""

    url: str
    about: About
    produces: bool
    model: str  # the name under which it serves its model
    tokens: tuple[object, ...] = ()  # of a text and of a chat; None where it does not say
    context: int = 0  # tokens of the longest prompt with its answer; 0: not known


def check(engines: Sequence[EngineReport]) -> list[Finding]:
    """All findings about engines of one setup. Each is compared with the first prefill engine among them, or with the
    first engine."""
    if len(engines) < 2:
        return []
    first = next((engine for engine in engines if engine.produces), engines[0])
    compared = [_compare(first, engine) for engine in engines if engine is not first]
    findings = [finding for finding in compared if finding is not None]
    if not findings:
        text = f"{len(engines)} engines serve {first.model} and speak wire schema {first.about.schemas}"
        if any(engine.about.model is None for engine in engines):
            text += (
                "; their weights were not compared: a version of pd-connector does not tell them"
            )
        findings = [Finding(AREA, "models", Status.OK, text)]
    drafts = [
        _drafts(engine, other) for engine in engines for other in engines if engine is not other
    ]
    return [*findings, *(engine for engine in drafts if engine is not None), *_contexts(engines)]


def schema(url: str, here: About, there: About) -> list[Finding]:
    """Whether the engine at `url` and one of this installation could speak to each other."""
    problem = _schema_problem(_HERE, here, url, there)
    return [Finding(url, "wire schema", Status.FAIL, *problem)] if problem else []


def _compare(first: EngineReport, other: EngineReport) -> Finding | None:
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
    for what, flag, first_tokens, two in zip(
        ("text", "chat"),
        ("--tokenizer", "--chat-template"),
        first.tokens,
        other.tokens,
        strict=False,
    ):
        if first_tokens and two and first_tokens != two:
            said = f"{first.url} and {other.url} make unlike tokens of the same {what}"
            advice = f"give both engines the same {flag}: KV of a prompt is of no use to an engine that reads other tokens"
            return Finding(AREA, "tokenizers", Status.FAIL, said, advice)
    if first.model != other.model:
        said = f"{first.url} serves {first.model}, {other.url} serves {other.model}"
        advice = (
            "a router pairs engines of one name only: give both engines the same model and the same "
            "--served-model-name, or name one setup at a time"
        )
        return Finding(AREA, "models", Status.WARN, said, advice)
    return None


def _drafts(source: EngineReport, target: EngineReport) -> Finding | None:
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


def _contexts(engines: Sequence[EngineReport]) -> list[Finding]:
    """Whether all engines take prompts of the same length."""
    said = [engine for engine in engines if engine.context]
    if len({engine.context for engine in said}) < 2:
        return []
    text = ", ".join(f"{engine.url} takes {engine.context:,} tokens" for engine in said)
    least = min(engine.context for engine in said)
    advice = (
        f"give all the same --max-model-len (SGLang: --context-length), or keep requests within {least:,} tokens. pd-router sends a "
        "longer one where it fits; other proxies get status 400 for it"
    )
    return [Finding(AREA, "contexts", Status.WARN, text, advice)]


def _schema_problem(name: str, ours: About, other: str, theirs: About) -> tuple[str, str] | None:
    older = apart(ours, theirs)
    if older is None:
        return None
    both = ((name, ours), (other, theirs))
    spoken = ", ".join(f"{who} speaks {it.schemas} ({it.version or 'older'})" for who, it in both)
    behind = name if older else other
    upgrade = behind if behind == _HERE else f"pd-connector at {behind}"
    text = f"no common wire schema: {spoken}: no KV passes between the two"
    return text, f"upgrade {upgrade}; one schema apart works"
