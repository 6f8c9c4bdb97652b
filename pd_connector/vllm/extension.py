# SPDX-License-Identifier: Apache-2.0
"""What an operator can ask of vLLM's workers, with
`--worker-extension-cls pd_connector.vllm.extension.WorkerExtension`."""


class WorkerExtension:
    """Becomes a part of vLLM's worker: `collective_rpc("set_weights_version", args=("step 1200",))`,
    or the same by vLLM's endpoint `/collective_rpc`, calls it in each."""

    def set_weights_version(self, version: str) -> None:
        """The weights were changed while the engine served, and are of this version now. KV passes
        between engines whose weights are of the same version.

        Raises:
            RuntimeError: this engine has no PDConnector.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from pd_connector.vllm.connector import PDConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, PDConnector):
            raise RuntimeError("this engine has no PDConnector, which weights are told to")
        connector.set_weights_version(version)

    def outgoing_transfers(self) -> int:
        """Transfers of this rank that decode engines have yet to fetch; 0 without a PDConnector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from pd_connector.vllm.connector import PDConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        return connector.outgoing_transfers() if isinstance(connector, PDConnector) else 0
