# SPDX-License-Identifier: Apache-2.0
"""The ranks of a vLLM engine, and the part of the model that each holds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pd_connector.kv.geometry import DRAFT_LAYERS, Shard
from pd_connector.protocol.wire.peers import Peer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_shards(vllm_config: "VllmConfig", own: Shard) -> tuple[Shard, ...]:
    """The shards of all ranks of this engine, as far as routes need them."""
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if pp == 1:
        return tuple(Shard(own.first_layer, own.stop_layer, rank, tp) for rank in range(tp))
    return tuple(
        Shard(*_stage(vllm_config, stage), rank, tp) for stage in range(pp) for rank in range(tp)
    )


def own_shard(vllm_config: "VllmConfig", numbers: list[int]) -> Shard:
    """The shard of this worker, which holds layers with these numbers."""
    parallel = vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    stage, rank = divmod(parallel.rank % parallel.world_size, tp)
    if parallel.pipeline_parallel_size == 1:
        own = [number for number in numbers if number < DRAFT_LAYERS]
        return Shard(min(own), max(own) + 1, rank, tp)
    return Shard(*_stage(vllm_config, stage), rank, tp)


def _stage(vllm_config: "VllmConfig", stage: int) -> tuple[int, int]:
    """Layers [first, stop) of a pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    first, stop = get_pp_indices(total, stage, vllm_config.parallel_config.pipeline_parallel_size)
    return first, stop


def gather_ranks(own: Peer) -> list[Peer]:
    """All ranks of this engine, ordered by (pipeline stage, tensor-parallel rank). Every rank calls this at the same
    time."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    ranks = [own]
    for group in (get_tp_group(), get_pp_group()):
        gathered: list[list[Peer]] = [[] for _ in range(group.world_size)]
        torch.distributed.all_gather_object(gathered, ranks, group=group.cpu_group)
        ranks = [rank for part in gathered for rank in part]
    return ranks


def in_order(peers: Mapping[tuple[int, int], Peer]) -> tuple[Peer, ...]:
    """The ranks in the order of (pipeline stage, tensor-parallel rank)."""
    return tuple(peers[key] for key in sorted(peers))
