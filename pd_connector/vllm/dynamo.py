# SPDX-License-Identifier: Apache-2.0
"""Makes PDConnector known to Dynamo's vLLM workers.

Dynamo looks up the connector's name for each prefill, in a table of how connectors are asked (`KV_CONNECTOR_PROTOCOLS`).
A name that is not there fails the request. PDConnector is asked as NixlConnector is, so it gets the same entry.
Dynamo has a `PdConnector` of its own, which differs in case only: it joins other connectors, as vLLM's MultiConnector
does.
"""

import importlib
import importlib.util
import logging
from importlib.metadata import PackageNotFoundError, version

from pd_connector.versions import DYNAMO
from pd_connector.vllm.support import NAME

logger = logging.getLogger("pd_connector.vllm")

MODULE = "dynamo.vllm.kv_connector_protocols"
ALIKE = "NixlConnector"
"""The connector whose parameters and answers PDConnector's are like."""


def join() -> None:
    """Add PDConnector to Dynamo's table, if Dynamo is installed here. Harmless to repeat; raises nothing."""
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
        found = _installed()
        tested = "" if found in DYNAMO else f", which is untested ({', '.join(DYNAMO)} is)"
        logger.info(
            "%s is known to Dynamo %s%s: its workers ask it as %s", NAME, found, tested, ALIKE
        )


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
