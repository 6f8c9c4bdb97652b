# SPDX-License-Identifier: Apache-2.0
"""Calls that an operator can make to vLLM's workers. They need
`--worker-extension-cls pd_connector.vllm.extension.WorkerExtension`."""


class WorkerExtension:
    """Becomes a part of vLLM's worker. `collective_rpc("set_weights_version", args=("step 1200",))`, or the same by
    vLLM's endpoint `/collective_rpc`, calls the method in each worker."""

    def set_weights_version(self, version: str) -> None:
        """Tell the connector that the weights were changed while the engine served, and their version. KV passes
        between engines whose weights have the same version.

        Raises:
            RuntimeError: this engine has no PDConnector.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from pd_connector.vllm.connector import PDConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, PDConnector):
            raise RuntimeError("this engine has no PDConnector to tell a version of the weights")
        connector.set_weights_version(version)

    def outgoing_transfers(self) -> int:
        """Transfers of this rank that decode engines have not yet fetched; 0 without a PDConnector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from pd_connector.vllm.connector import PDConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        return connector.outgoing_transfers() if isinstance(connector, PDConnector) else 0
