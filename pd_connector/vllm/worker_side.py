# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker: describes the cache to an agent and relays commands and outcomes."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pd_connector.agent import Agent, Command
from pd_connector.config import Config
from pd_connector.consumer import Finished
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.geometry import Geometry, Shard
from pd_connector.identity import model_fingerprint
from pd_connector.pages import PagedCache
from pd_connector.vllm.messages import RankAddress, WorkerActivity
from pd_connector.vllm.metrics import PDStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("pd_connector.vllm")


class WorkerSide:
    """Called by vLLM's model runner only. `agent` exists from `register` until `close`."""

    def __init__(self, vllm_config: "VllmConfig", config: Config) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._agent: Agent | None = None
        self._rank = str(vllm_config.parallel_config.rank)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache tensors (by layer name) and start the agent.

        Raises:
            UnsupportedGeometryError: the cache has a form that cannot be moved.
        """
        self.close()
        layers = _distinct_layers(kv_caches)
        geometry = describe_geometry(layers, self._vllm_config)
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        self._agent = Agent(
            self._config,
            transfer.engine_id,
            fingerprint_model(self._vllm_config),
            PagedCache(layers, geometry),
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
        )
        logger.info(
            "PDConnector ready: engine %s, %s, control port %s:%d, transports %s, %s",
            transfer.engine_id,
            transfer.kv_role,
            self._config.host,
            self._agent.port,
            ",".join(self._config.transports),
            geometry,
        )

    def address(self) -> RankAddress:
        assert self._agent is not None
        return RankAddress(self._config.host, self._agent.port)

    def obey(self, commands: list[Command]) -> None:
        """Hand a step's commands to the agent."""
        assert self._agent is not None or not commands
        for command in commands:
            self._agent.submit(command)  # type: ignore[union-attr]

    def outcomes(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose pages may be freed, whose load has ended, and whose load failed."""
        sent: set[str] = set()
        received: set[str] = set()
        failed: set[str] = set()
        for outcome in self._agent.outcomes() if self._agent else ():
            if isinstance(outcome, Finished):
                received.add(outcome.request)
                if outcome.cause is not None:
                    failed.add(outcome.request)
            else:
                sent.add(outcome.request)
        return sent, received, failed

    def stats(self) -> PDStats | None:
        """What was counted since the last step, if anything, and the gauges."""
        return PDStats.of(self._agent.telemetry, self._rank) if self._agent else None

    def activity(self) -> WorkerActivity:
        """Slots that are out; zero when everything has come home."""
        gauges = self._agent.telemetry.gauges() if self._agent else {}
        return WorkerActivity(int(gauges.get("landing_slots", 0) + gauges.get("send_slots", 0)))

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def describe_geometry(layers: list[torch.Tensor], vllm_config: "VllmConfig") -> Geometry:
    """The geometry of vLLM's cache tensors, each `[page, head, token, K and V]`.

    Raises:
        UnsupportedGeometryError: tensors of another form, or of unlike forms.
    """
    shapes = {(layer.shape[1:], layer.dtype) for layer in layers}
    if len(shapes) != 1 or layers[0].ndim != 4:
        raise UnsupportedGeometryError(
            f"cache layers of shapes {sorted(str(shape) for shape in shapes)}: this version moves "
            "caches whose layers are alike, of form [page, head, token, K and V]"
        )
    layer = layers[0]
    _, heads, kernel_page_size, width = layer.shape
    cache = vllm_config.cache_config
    page_size = cache.block_size
    order = sorted(range(3), key=lambda axis: -layer.stride(axis + 1))
    layout = "".join("HNC"[axis] for axis in order)
    dtype = str(layer.dtype).removeprefix("torch.")
    return Geometry(
        shard=Shard(0, len(layers), 0, heads),
        page_size=page_size,
        token_bytes=width * layer.element_size(),
        dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        layout=f"{layer.device.type}/{_packing(vllm_config)}/{layout}/{kernel_page_size}",
    )


def fingerprint_model(vllm_config: "VllmConfig") -> bytes:
    """Fingerprint of the model that vLLM serves."""
    model = vllm_config.model_config
    config: dict[str, Any] = model.hf_config.to_dict()
    config["served_dtype"] = str(model.dtype)
    config["served_quantization"] = str(model.quantization)
    if vllm_config.load_config.load_format == "dummy":
        return model_fingerprint(config, None, seed=model.seed)
    folder = _checkpoint_folder(model.model, model.revision)
    if folder is None:
        logger.warning(
            "weights of %s are not on this disk: models are told apart by name and config only",
            model.model,
        )
        config["served_name"] = f"{model.model}@{model.revision}"
    return model_fingerprint(config, folder)


def _checkpoint_folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _distinct_layers(kv_caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Layer tensors in model order; layers that share one cache appear once."""
    from vllm.model_executor.models.utils import extract_layer_index

    named = sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0]))
    return list({tensor.data_ptr(): tensor for _, tensor in named}.values())


def _packing(vllm_config: "VllmConfig") -> str:
    """How an attention backend packs K and V within a page, as far as its name tells."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    backends = get_current_attn_backends(vllm_config)
    names = "+".join(sorted(backend.get_name() for backend in backends))
    if not names.startswith("CPU"):
        return names
    # On CPU the order of elements depends on the instruction set, too.
    flags = torch.backends.cpu.get_cpu_capability()
    return f"{names}-{flags}"
