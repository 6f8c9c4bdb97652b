# SPDX-License-Identifier: Apache-2.0
"""Whether a model hands over, by its `config.json` and the table of models (docs/models.md)."""

import json
import os
from pathlib import Path
from typing import Any

from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.models import Standing, Support, find

_STATUS = {Standing.RUN: Status.OK, Standing.SAME: Status.WARN, Standing.REFUSED: Status.WARN}
_SAID = {
    Standing.RUN: "hands over",
    Standing.SAME: "hands over; no test has run this architecture",
    Standing.REFUSED: "does not hand over",
}


_ADVICE = (
    "give a folder with a config.json that has architectures, or the name of a downloaded model"
)


def check(model: str) -> list[Finding]:
    """Findings about a model.

    Args:
        model: its folder, its `config.json`, or a name that Hugging Face's cache on this machine has.
    """
    area = f"model {model}"
    try:
        config = json.loads(config_of(model).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return [Finding(area, "config.json", Status.FAIL, str(error), _ADVICE)]
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures:
        said = f"has architectures {architectures!r}: must be a list of names"
        return [Finding(area, "config.json", Status.FAIL, said, _ADVICE)]
    return _findings(area, list(map(str, architectures)))


def _findings(area: str, architectures: list[str]) -> list[Finding]:
    model = find(architectures)
    named = ", ".join(architectures)
    if model is None:
        detail = f"{named}: not in the table of models"
        advice = "start an engine with it: what cannot be moved is refused by name at the start"
        return [Finding(area, "architecture", Status.WARN, detail, advice)]
    nowhere = model.vllm.standing is model.sglang.standing is Standing.REFUSED
    architecture = f"{named} ({model.names}): {model.cache}"
    return [
        Finding(area, "architecture", Status.FAIL if nowhere else Status.OK, architecture),
        _finding(area, "vLLM", model.vllm),
        _finding(area, "SGLang", model.sglang),
    ]


def _finding(area: str, engine: str, support: Support) -> Finding:
    said = _SAID[support.standing]
    detail = f"{said}. {support.why}" if support.why else said
    return Finding(area, engine, _STATUS[support.standing], detail, support.remedy)


def config_of(model: str) -> Path:
    """The `config.json` of a model: of its folder, or in Hugging Face's cache. Raises OSError if it is not on this
    machine."""
    path = Path(os.path.expanduser(model))
    if path.is_file():
        return path
    if path.is_dir():
        return path / "config.json"
    cached: Any = None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except ImportError:
        raise FileNotFoundError(
            f"{model}: no such folder; huggingface_hub is not installed, so its cache is not looked at"
        ) from None
    except ValueError:  # no name of a model
        pass
    if not isinstance(cached, str):
        raise FileNotFoundError(f"{model}: no such folder, and not in Hugging Face's cache here")
    return Path(cached)
