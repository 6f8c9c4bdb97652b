# SPDX-License-Identifier: Apache-2.0
"""Makes PDConnector known to Dynamo's vLLM workers.

For each prefill, Dynamo looks up the connector's name in a table of request formats (`KV_CONNECTOR_PROTOCOLS`). A name
that is not in the table fails the request. PDConnector takes the same request fields as NixlConnector, so it gets the
same entry. Dynamo has a `PdConnector` of its own, which differs in case only: it joins other connectors, as vLLM's
MultiConnector does.

Dynamo's workers have a `/metrics` of their own, which passes on an engine's metrics by their prefix. Ours is added.
"""

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from pd_connector.agent.metrics import PREFIX
from pd_connector.versions import DYNAMO
from pd_connector.vllm.support import NAME
from pd_connector.vllm.wrap_once import wrap_once

logger = logging.getLogger("pd_connector.vllm")

MODULE = "dynamo.vllm.kv_connector_protocols"
ALIKE = "NixlConnector"
"""The connector whose parameters and answers PDConnector's are like."""
METRICS = "dynamo.common.utils.prometheus"
FILTER = "_compile_include_pattern"
"""Its function that makes a pattern of the prefixes of metrics to show."""
ALIKE_METRICS = "vllm:"
"""Where metrics with this prefix are shown, ours are."""


def join() -> None:
    """Add PDConnector to Dynamo's table, and its metrics to Dynamo's, if Dynamo is installed here.

    Harmless to repeat; raises nothing."""
    _join_table()
    _join_metrics()


def _join_table() -> None:
    try:
        if importlib.util.find_spec(MODULE) is None:
            return
        table = importlib.import_module(MODULE).KV_CONNECTOR_PROTOCOLS
        if NAME in table:
            return
        table[NAME] = table[ALIKE]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "dynamo":  # no Dynamo, or one without vLLM's workers
            return
        _failed(error)
    except Exception as error:  # another version of Dynamo's must not stop vLLM
        _failed(error)
    else:
        installed = _installed()
        tested = "" if installed in DYNAMO else f", which is untested ({', '.join(DYNAMO)} is)"
        logger.info(
            "%s is known to Dynamo %s%s: its workers ask it as %s", NAME, installed, tested, ALIKE
        )


def _join_metrics() -> None:
    """Have Dynamo's `/metrics` show our metrics beside vLLM's. Only the process that serves `/metrics` has Dynamo's
    module."""
    module = sys.modules.get(METRICS)
    if module is None:
        return
    try:
        wrap_once(module, FILTER, _with_ours)
    except AttributeError as error:
        logger.warning(
            "The /metrics of Dynamo %s will lack %s*. The engine's log has their sums (%r)",
            *(_installed(), PREFIX, error),
        )


def _with_ours(
    original: Callable[..., re.Pattern[str]], prefixes: tuple[str, ...]
) -> re.Pattern[str]:
    return original((*prefixes, PREFIX) if ALIKE_METRICS in prefixes else prefixes)


def _failed(error: Exception) -> None:
    logger.warning(
        "%s cannot be made known to Dynamo %s: its prefill workers will answer that kv_connector %r is unsupported. "
        "%s is known to work (%r)",
        *(NAME, _installed(), NAME, ", ".join(DYNAMO), error),
    )


def _installed() -> str:
    try:
        return version("ai-dynamo")
    except PackageNotFoundError:
        return "of an unknown version"
