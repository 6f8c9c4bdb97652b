# SPDX-License-Identifier: Apache-2.0
"""Checks that a prefill engine's ranks can listen where the config says, before vLLM loads weights for minutes."""

import errno
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pd_connector.config import Config
from pd_connector.control.addresses import bound, numeric
from pd_connector.errors import ConfigError
from pd_connector.hosts import port_range

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

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
    """How many of these ports are free; the system chooses as many as are wanted."""
    free = 0
    with ExitStack() as held:
        for port in ports:
            try:
                held.enter_context(bound(address, port, 1, again=True))
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
