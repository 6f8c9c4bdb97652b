# SPDX-License-Identifier: Apache-2.0
"""The handshake of the control channel, as a decode engine here would begin it: with the key, or without one."""

import os
import time
from collections.abc import Mapping

from pd_connector.agent.consuming.discovery import ask_ranks
from pd_connector.agent.handshake import RefusedError
from pd_connector.config import KEY_VARIABLE, Config
from pd_connector.errors import Cause, ConfigError

HANDSHAKE_S = 5.0

Problem = tuple[str, str]
"""The result, and what to do about it."""


def greet(
    host: str, port: int, environment: Mapping[str, str] = os.environ, limit_s: float = HANDSHAKE_S
) -> Problem | None:
    """Request an engine's ranks over its control port. Returns why that fails, and which side's key is wrong; None if it
    works.

    Args:
        limit_s: for each of two tries.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    try:
        Config.load({"key": key}, {})
    except ConfigError as error:
        return (
            f"{KEY_VARIABLE} here: {error}",
            f"set {KEY_VARIABLE} here to the engines' common key",
        )
    refused = _refused(host, port, key, limit_s)
    if refused is None:
        return None
    if refused.cause in (Cause.VERSION, Cause.MALFORMED_MESSAGE):
        return str(refused), "install one version of pd-connector on both sides"
    if not key:
        result = f"{host}:{port} does not answer without a key, and {KEY_VARIABLE} is not set here"
        return result, f"set {KEY_VARIABLE} here to that engine's key, and try again"
    if _refused(host, port, "", limit_s) is None:
        result = f"{host}:{port} has no key, and {KEY_VARIABLE} is set here"
        return result, f"start that engine with {KEY_VARIABLE} set to the key that is set here"
    result = f"{host}:{port} does not accept the key that is set here ({KEY_VARIABLE})"
    advice = (
        "the two keys differ: visit the other engines with the same key (--peer). If they accept it, that "
        "engine's key is wrong; if none does, the one here is"
    )
    return result, advice


def _refused(host: str, port: int, key: str, limit_s: float) -> RefusedError | None:
    config = Config(key=key, insecure=True)  # also over a network: the only request is for ranks
    try:
        ask_ranks(config, host, port, time.monotonic() + limit_s)
    except RefusedError as error:
        return error
    return None
