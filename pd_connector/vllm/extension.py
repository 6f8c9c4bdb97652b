# SPDX-License-Identifier: Apache-2.0
"""Calls that an operator can make to vLLM's workers. They need
`--worker-extension-cls pd_connector.vllm.extension.WorkerExtension`."""

from abc import ABC, abstractmethod


class Operated(ABC):
    """The connector that receives the calls. The connector imports this module, not the reverse, because `weight_loads`
    imports the calls' names from here, and the connector needs `weight_loads`."""

    @abstractmethod
    def set_weights_version(self, version: str) -> None:
        """See `WorkerExtension`."""

    @abstractmethod
    def outgoing_transfers(self) -> int:
        """See `WorkerExtension`."""


class WorkerExtension:
    """Becomes a part of vLLM's worker. `collective_rpc("set_weights_version", args=("step 1200",))`, or the same by
    vLLM's endpoint `/collective_rpc`, calls the method in each worker."""

    def set_weights_version(self, version: str) -> None:
        """Tell the connector that the weights were changed while the engine served, and their version. KV passes
        between engines whose weights have the same version.

        Raises:
            RuntimeError: this engine has no PDConnector.
        """
        if (connector := _connector()) is None:
            raise RuntimeError(
                "this engine has no PDConnector: nothing here uses a version of the weights"
            )
        connector.set_weights_version(version)

    def outgoing_transfers(self) -> int:
        """Transfers of this rank that decode engines have not yet fetched; 0 without a PDConnector."""
        connector = _connector()
        return 0 if connector is None else connector.outgoing_transfers()


def _connector() -> Operated | None:
    """This worker's PDConnector, if it has one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, Operated) else None
