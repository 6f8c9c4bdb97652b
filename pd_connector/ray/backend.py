# SPDX-License-Identifier: Apache-2.0
"""Ray Serve LLM's calls to a connector of a prefill/decode application.

Ray makes one backend in each replica, and calls:

    setup                      before the engine starts: may change the engine's arguments
    replica_metadata           once a prefill replica's engine has started: its address
    prepare_prefill_request    for each request, in the decode replica, with the prefill replica's
    prepare_decode_request     address

Both requests are sent at the same time, so that KV passes while the prompt is being computed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.utils.server_utils import get_serve_request_id

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE, Config
from pd_connector.control.seal import UntrustedAddressError, trusted_address
from pd_connector.errors import PDConnectorError
from pd_connector.hosts import is_loopback
from pd_connector.protocol.wire.params import (
    ProducerAddress,
    decode_params,
    parse_address,
    prefill_params,
)
from pd_connector.ray.carried import why_alone


class NoAddressError(PDConnectorError):
    """The engine has started but has not published its address."""


class PublishedAddress:
    """A file in memory into which the engine writes its address (config key `address_file`).

    It has no name on any disk. It disappears with the process that made it, even if that process is killed.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("pd_connector_address")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """The path, for processes of the same user on this machine."""

    def read(self) -> ProducerAddress:
        """The address.

        Raises:
            NoAddressError: the engine has not written an address.
        """
        written = os.pread(self._file, os.fstat(self._file).st_size, 0)
        try:
            address = parse_address(json.loads(written))
        except ValueError:
            address = None
        if address is None:
            raise NoAddressError(
                f"the engine wrote {written[:80]!r}: wanted its address, which PDConnector writes "
                "when the engine starts. Is kv_connector PDConnector, of the same version as Ray's "
                "side?"
            )
        return address


logger = logging.getLogger("ray.serve")

WORKER_EXTENSION = "pd_connector.vllm.extension.WorkerExtension"
_NODE = "ray_node_id"
_NOT_FOR_PREFILL: Mapping[str, Any] = {
    "best_of": None,
    "echo": False,
    "logprob_token_ids": None,
    "logprobs": None,
    "min_tokens": 0,  # a higher number than the prefill's one token is an error
    "n": 1,
    "prompt_logprobs": None,
    "return_prompt_text": None,
    "return_token_ids": None,
    "structured_outputs": None,
    "top_logprobs": None,
    "use_beam_search": False,
}
"""Fields that do not change a prompt's KV, with their values in a prefill request. A field that is missing in a
request stays missing."""


class PDConnectorBackend(BaseConnectorBackend):
    """Ray's backend for `"kv_connector": "PDConnector"`."""

    requires_peer_binding = True
    concurrent_handoff = True

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._published: PublishedAddress | None = None
        self._engine_id = ""
        self._node_id = ""
        self._refused: set[str] = set()
        self.config = Config()

    def setup(self) -> None:
        """Give the engine an id and an address of its own.

        Raises:
            ConfigError: a config key of `kv_connector_extra_config` is wrong; the message has its name.
        """
        transfer = self.kv_transfer_config
        extra = transfer.get("kv_connector_extra_config") or {}
        transfer["kv_connector_extra_config"] = extra
        self.config = Config.load(extra)
        named = "host" in extra or os.environ.get(HOST_VARIABLE)
        if not named and (self.config.key or self.config.insecure):
            extra["host"] = ray.util.get_node_ip_address()
            self.config = Config.load(extra)
        self._engine_id = transfer["engine_id"] = self._own_name(transfer.get("engine_id"))
        if ray.is_initialized():
            self._node_id = ray.get_runtime_context().get_node_id()
        self._published = PublishedAddress()
        extra["address_file"] = self._published.path
        if not self.llm_config.engine_kwargs.get("worker_extension_cls"):
            self.llm_config.update_engine_kwargs(worker_extension_cls=WORKER_EXTENSION)

    def _own_name(self, given: str | None) -> str:
        """An engine id that no other engine has. Replicas share one config, so an id from the config is not enough.
        Replicas without an id, as in Ray's tests, get a random suffix."""
        replica = getattr(serve.get_replica_context(), "replica_id", None)
        if replica is None:
            return f"{given or 'engine'}-{self._get_unique_suffix()}"
        return f"{given or replica.deployment_id.name}-{replica.unique_id}"

    def replica_metadata(self) -> dict[str, Any]:
        """The address of this replica's engine, for decode replicas.

        Raises:
            NoAddressError: the engine has not written it.
        """
        assert self._published is not None
        return {**self._published.read().fields(), _NODE: self._node_id}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """The same prompt with one token to generate; the prefill replica keeps its KV."""
        shaped = request.model_copy(deep=True)
        clamp_request_to_single_token(shaped)
        for field, value in _NOT_FOR_PREFILL.items():
            if hasattr(shaped, field):
                setattr(shaped, field, value)
        has_transfer = self._producer_for(request, peer) is not None
        shaped.kv_transfer_params = (
            prefill_params(self._transfer(request)) if has_transfer else None
        )
        return shaped

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """The client's request, with the place of its prompt's KV."""
        shaped = request.model_copy(deep=True)
        address = self._producer_for(request, peer)
        params = None if address is None else decode_params(address, self._transfer(request))
        shaped.kv_transfer_params = params
        return shaped

    def _producer_for(self, request: Any, peer: Mapping[str, Any] | None) -> ProducerAddress | None:
        """The address to fetch this request's KV from. None: the decode engine computes the prompt. Ray's own decode
        server calls this for every request, even if one transfer cannot carry it."""
        return self.address_of(peer) if why_alone(request) is None else None

    def address_of(self, peer: Mapping[str, Any] | None) -> ProducerAddress | None:
        """The address at which this replica reaches a prefill replica's engine. None if it cannot, which is
        logged once for each."""
        address = parse_address(dict(peer)) if peer else None
        if address is None:
            self._refuse(str(peer)[:80], "it has published no address of PDConnector's")
            return None
        elsewhere = peer is not None and peer.get(_NODE) != self._node_id
        if not self.config.permits(address.host):
            detail = f"its address is {address.host}, and this replica has no key"
        elif elsewhere and is_loopback(address.host):
            detail = f"it is on another node, and its address is {address.host}: it has no key"
        else:
            try:
                trusted_address(address, self.config)
            except UntrustedAddressError as error:  # the engine would also compute the prompt
                detail = str(error)
            else:
                return address
        self._refuse(
            address.engine_id,
            f"{detail}. Set {KEY_VARIABLE} to the same secret on every node (`pd-connector key` "
            "makes one), or `insecure: true` on both sides and the nodes' network as `peers` if it is "
            "trusted",
        )
        return None

    def _refuse(self, engine: str, why: str) -> None:
        if engine not in self._refused:
            self._refused.add(engine)
            logger.error("prefill replica %s: %s. Its prompts are computed here", engine, why)

    def _transfer(self, request: Any) -> str:
        """The name of a request's KV, the same at each call for the same request.

        It begins with Serve's request id, which is in the logs of both replicas. A client may choose the same id
        twice; the rest tells such requests apart.
        """
        own = f"{self._engine_id} {request.request_id}".encode("utf-8", "replace")
        rest = hashlib.sha256(own).hexdigest()[:16]
        seen = get_serve_request_id() or ""
        plain = "".join(c for c in seen[:128] if c.isascii() and c.isprintable())
        return f"{plain}.{rest}"
