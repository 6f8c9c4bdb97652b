# SPDX-License-Identifier: Apache-2.0
"""Checks the connector's config before vLLM does anything else with its arguments.

vLLM makes a connector minutes later, in other processes, after it has loaded the weights. A wrong config would be
told there, between the logs of all of them. Here the process that the operator started ends with the error, and the
error is the last line of its log.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.cpu_memory import warn_if_alone
from pd_connector.vllm.early_place import check_place
from pd_connector.vllm.support import check_name, check_supported, connector_parts, load_config
from pd_connector.vllm.wrap_once import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def watch() -> None:
    """Check the arguments of each engine that is made from now on. Harmless to repeat."""
    from vllm.engine.arg_utils import EngineArgs

    wrap_once(EngineArgs, "create_engine_config", _checked)


def _checked(
    original: Callable[..., "VllmConfig"], args: "EngineArgs", *more: Any, **options: Any
) -> "VllmConfig":
    check_name(args.kv_transfer_config)
    extras = connector_parts(args.kv_transfer_config)
    for extra in extras:
        check_place(args, load_config(extra))
    config = original(args, *more, **options)
    if extras:
        check_supported(config)
        warn_if_alone(config)
    return config
