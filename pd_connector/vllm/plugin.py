# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `vllm.general_plugins`; vLLM calls it in each of its processes."""

import logging


def register() -> None:
    """Make `"kv_connector": "PDConnector"` known to vLLM. Harmless to repeat."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "PDConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "PDConnector", "pd_connector.vllm.connector", "PDConnector"
        )


def join_engine_log() -> None:
    """Send the package's log where vLLM's goes, in its form."""
    ours, theirs = logging.getLogger("pd_connector"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
