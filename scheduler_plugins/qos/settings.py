# SPDX-License-Identifier: Apache-2.0
"""Settings that the scheduler and the middleware of a server share: the paths of their configuration files, and the
place of the class in a request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pd_connector.errors import did_you_mean

SETTINGS_KEY = "pd_scheduler"
SETTINGS_VARIABLE = "PD_SCHEDULER_CONFIG"
COST_MODEL_KEY = "pd_cost_model"
COST_MODEL_VARIABLE = "PD_SCHEDULER_COST_MODEL"
_KEYS = (SETTINGS_KEY, COST_MODEL_KEY)
QOS_KEY = "qos"
"""Key for the name of a request's class. In vLLM it is a key of `vllm_xargs`, and so of `SamplingParams.extra_args`; in
SGLang, of `custom_params`."""


def settings_path(vllm_config: Any) -> Path | None:
    """The YAML file of classes, policy and routes; None: the defaults apply.

    `--additional-config '{"pd_scheduler": "FILE"}'` overrides the environment variable `PD_SCHEDULER_CONFIG`.
    """
    return _path(vllm_config, SETTINGS_KEY, SETTINGS_VARIABLE)


def cost_model_path(vllm_config: Any) -> Path | None:
    """A profile's cost model, `"pd_cost_model"` or `PD_SCHEDULER_COST_MODEL`; None: the engine learns the cost
    model."""
    return _path(vllm_config, COST_MODEL_KEY, COST_MODEL_VARIABLE)


def _path(vllm_config: Any, key: str, variable: str) -> Path | None:
    additional = vllm_config.additional_config
    given = additional if isinstance(additional, dict) else {}
    for name in given:
        if str(name).startswith("pd") and name not in _KEYS and (near := did_you_mean(name, _KEYS)):
            raise ValueError(f"--additional-config {name!r}: is not known; {near}")
    named = given.get(key)
    if named is not None and not isinstance(named, str):
        raise ValueError(f"--additional-config {key} {named!r}: must be the path of a file")
    return Path(named).expanduser() if named else path_in(variable)


def path_in(variable: str) -> Path | None:
    """The file that an environment variable names; None if the variable is not set."""
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else None
