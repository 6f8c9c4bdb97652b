# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `vllm.general_plugins`; vLLM calls it in each of its processes."""

import logging

from pd_connector.versions import advice, supported_range

logger = logging.getLogger("pd_connector.vllm")


def register() -> None:
    """Register `"kv_connector": "PDConnector"` with vLLM, check its config before anything is loaded, and make AMX
    usable. Also record the modules of the model that is built, and the files from which the model and its config are
    loaded. Register it with Dynamo, too. Harmless to repeat.

    vLLM logs an exception of a plug-in and continues. It would later call the connector unsupported, so the reason is
    logged here, with advice."""
    import vllm

    join_engine_log()
    try:
        _register()
    except Exception as error:
        first, last = supported_range()
        what = advice(vllm.__version__) or f"{first} to {last} are supported"
        logger.error(
            "PDConnector cannot be registered with vLLM %s: %r. What to do: %s",
            *(vllm.__version__, error, what),
        )
        raise


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pd_connector.vllm import dynamo, early_check
    from pd_connector.vllm.identity import config_files, owners, weight_loads

    if "PDConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "PDConnector", "pd_connector.vllm.connector", "PDConnector"
        )
    dynamo.join()
    early_check.watch()
    config_files.watch()
    owners.watch()
    weight_loads.watch()
    ask_for_amx()


def ask_for_amx() -> bool:
    """Ask Linux for AMX's tiles if vLLM would use them; returns whether the process has them.

    vLLM's attention on a CPU uses tiles without this request, because an earlier matrix product in AMX has usually made
    it. On a decode engine there is none: its first step computes one token, and Linux kills the process (SIGILL).
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not torch.cpu._is_amx_tile_supported():
        return False
    return bool(torch.cpu._init_amx())


def join_engine_log() -> None:
    """Send the package's log to vLLM's log, in the same format."""
    ours, theirs = logging.getLogger("pd_connector"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
