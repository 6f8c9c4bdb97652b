# SPDX-License-Identifier: Apache-2.0
"""Decode engines that draft, and prefill engines without their draft model: by `--speculative-config`. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.tools.cli.checks.finding import Finding, Status

_WITHOUT_KV = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Methods whose drafts keep no KV: nothing of them passes."""
_NAMES = ("method", "model")
"""What makes two drafts alike."""


class Drafting(NamedTuple):
    """An engine in a file.

    Attributes:
        place: of its config.
        role: its `kv_role`.
        speculation: its `--speculative-config`; empty without one.
    """

    place: str
    role: str
    speculation: str


def together(engines: Sequence[Drafting]) -> Iterator[Finding]:
    """All findings. Engines that are all `kv_both` may share a pool only."""
    for engine in engines:
        draft = _draft(engine.speculation)
        if not draft or engine.role == "kv_producer":
            continue
        lacking = [
            other.place
            for other in engines
            if other is not engine
            and other.role != "kv_consumer"
            and _draft(other.speculation) != draft
        ]
        if lacking:
            yield Finding(
                engine.place,
                "drafts",
                Status.WARN,
                f"the engine drafts ({_text(draft)}), and the engine of {', '.join(lacking)} does not have that draft model: "
                "KV of that engine is not taken here, by a handoff or from a pool, since no draft would be accepted after it",
                "give both engines the same --speculative-config",
            )


def _draft(speculation: str) -> Mapping[str, Any]:
    """What makes the draft, if it keeps KV; empty otherwise. A text that is not JSON stands for itself."""
    if not speculation:
        return {}
    try:
        config = json.loads(speculation)
    except ValueError:
        return {"config": speculation}
    named = {name: config[name] for name in _NAMES if name in config}
    kept_nowhere = any(str(value) in _WITHOUT_KV for value in named.values())
    return {} if kept_nowhere else named


def _text(draft: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in draft.items())
