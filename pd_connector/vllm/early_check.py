# SPDX-License-Identifier: Apache-2.0
"""Checks the connector's config before vLLM does anything else with its arguments.

vLLM makes a connector minutes later, in other processes, after it has loaded the weights. There the error of a wrong
config would be lost between the logs of all these processes. Here the process that the operator started ends with the
error, and the error is the last line of its log.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pd_connector.config import Config
from pd_connector.control.addresses import bound, numeric
from pd_connector.errors import ConfigError
from pd_connector.hosts import port_range
from pd_connector.vllm.support import check_name, check_supported, connector_parts, load_config
from pd_connector.vllm.wrap_once import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("pd_connector.vllm")

GIB = 1 << 30
HALF = 0.5
"""Two engines that take no more fit beside each other."""


def warn_if_alone(config: "VllmConfig") -> None:
    """Log a warning if this engine runs on CPUs and takes too much of the machine's memory for a second engine."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    part = cache.gpu_memory_utilization
    if not current_platform.is_cpu() or cache.kv_cache_memory_bytes is not None or part <= HALF:
        return
    total_gib = current_platform.get_device_total_memory() / GIB
    logger.warning(
        "no size of the KV cache is set: on CPUs vLLM reserves %.0f %% of the memory for this engine, %.1f of %.1f GiB, "
        "so no second engine starts on this machine. What to do: set VLLM_CPU_KVCACHE_SPACE, in GiB, for each engine",
        *(part * 100, part * total_gib, total_gib),
    )


_CHECKED = "_PD_CONNECTOR_PLACE_CHECKED"
"""Set for child processes: vLLM's API servers make their config again, when the engine listens already."""
_PATIENCE_S = 5.0
"""An engine that was here before may need this long to end."""


def check_place(args: "EngineArgs", config: Config) -> None:
    """Check host and ports once for this process and its children.

    Raises:
        ConfigError: the ranks of this engine could not listen there.
    """
    transfer = args.kv_transfer_config
    elsewhere = args.distributed_executor_backend == "ray" or getattr(args, "nnodes", 1) > 1
    if _CHECKED in os.environ or elsewhere or transfer is None or not transfer.is_kv_producer:
        return
    try:
        address = numeric(config.host)
    except OSError as error:
        raise _not_here(config.host, error) from None
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size * _engines_here(args)
    ranks *= getattr(args, "prefill_context_parallel_size", 1)
    for key, value in (("control_port", config.control_port), ("data_port", config.data_port)):
        deadline = time.monotonic() + _PATIENCE_S
        while (free := _free(config.host, address, port_range(value), key)) < ranks:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{key} {value}: {free} of these ports are free, and this engine has {ranks} ranks that need one "
                    f"each; name others, or end the program that holds them (config key {key})"
                )
            time.sleep(0.1)
    os.environ[_CHECKED] = "1"


def _engines_here(args: "EngineArgs") -> int:
    """How many data-parallel engines vLLM starts on this machine with these arguments."""
    if args.data_parallel_external_lb or args.data_parallel_rank is not None:
        return 1  # each engine is started by itself
    return int(args.data_parallel_size_local or args.data_parallel_size)


def _free(host: str, address: str, ports: range, key: str) -> float:
    """How many of these ports are free; infinite if the system chooses the ports."""
    free = 0
    with ExitStack() as held:
        for port in ports:
            try:
                held.enter_context(bound(address, port, 1))
                free += 1
            except OSError as error:
                if error.errno == errno.EACCES:
                    raise ConfigError(
                        f"{key} {port}: this user must not listen there; name ports above 1023 (config key {key})"
                    ) from None
                if error.errno != errno.EADDRINUSE:
                    raise _not_here(host, error) from None
    return float("inf") if ports == range(1) else free


def _not_here(host: str, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(
        f"host {host!r}: {why}; must be a name or an address of this machine (config key host)"
    )


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
