# SPDX-License-Identifier: Apache-2.0
"""The ranks of a vLLM engine, and the part of the model that each holds."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pd_connector.kv.geometry import DRAFT_LAYERS, Shard
from pd_connector.protocol.wire.peers import Peer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_shards(vllm_config: "VllmConfig", own: Shard) -> tuple[Shard, ...]:
    """The shards of all ranks of this engine, as far as routes need them."""
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    cp, pcp = context_parallel(vllm_config)
    stages = [(own.first_layer, own.stop_layer)]
    if pp > 1:
        stages = [_stage(vllm_config, stage) for stage in range(pp)]
    return tuple(
        Shard(first, stop, rank, tp, cp, pcp_rank, pcp)
        for first, stop in stages
        for pcp_rank in range(pcp)
        for rank in range(tp)
    )


def own_shard(vllm_config: "VllmConfig", numbers: list[int]) -> Shard:
    """The shard of this worker, which holds layers with these numbers."""
    parallel = vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    cp, pcp = context_parallel(vllm_config)
    # vLLM numbers its workers by stage, then by rank of prefill context parallelism, then by tensor-parallel rank.
    place, rank = divmod(parallel.rank % parallel.world_size, tp)
    stage, pcp_rank = divmod(place, pcp)
    if parallel.pipeline_parallel_size == 1:
        own = [number for number in numbers if number < DRAFT_LAYERS]
        layers = min(own), max(own) + 1
    else:
        layers = _stage(vllm_config, stage)
    return Shard(*layers, rank, tp, cp, pcp_rank, pcp)


def context_parallel(vllm_config: "VllmConfig") -> tuple[int, int]:
    """Sizes of decode context parallelism and of prefill context parallelism. Only decode context parallelism divides a
    sequence's cached tokens among ranks."""
    parallel = vllm_config.parallel_config
    sizes = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    return int(sizes[0]), int(sizes[1])


def _stage(vllm_config: "VllmConfig", stage: int) -> tuple[int, int]:
    """Layers [first, stop) of a pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    first, stop = get_pp_indices(total, stage, vllm_config.parallel_config.pipeline_parallel_size)
    return first, stop


R = TypeVar("R")


def gather_ranks(own: Peer) -> list[Peer]:
    """All ranks of this engine. Every rank calls this at the same time."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    ranks = [own]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        ranks = _gather(ranks, group)
    return ranks


def gather_copies(own: R) -> list[R]:
    """Gather from all ranks that differ only in their rank of prefill context parallelism. They all call this at the
    same time."""
    from vllm.distributed.parallel_state import get_pcp_group

    return _gather([own], get_pcp_group())


def _gather(ranks: list[R], group: Any) -> list[R]:
    gathered: list[list[R]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, ranks, group=group.cpu_group)
    return [rank for part in gathered for rank in part]


def in_order(peers: Iterable[Peer]) -> tuple[Peer, ...]:
    """The ranks by pipeline stage, then by rank of prefill context parallelism, then by tensor-parallel rank."""
    return tuple(
        sorted(peers, key=lambda p: (p.shard.first_layer, p.shard.pcp_rank, p.shard.tp_rank))
    )
