# SPDX-License-Identifier: Apache-2.0
"""What this vLLM engine is, as its scheduler needs to know it."""

from typing import TYPE_CHECKING, NamedTuple

from pd_connector.vllm.handoff.left_tokens import left_tokens, takes_inputs_whole
from pd_connector.vllm.identity.inputs import adapter_settings, processor_settings
from pd_connector.vllm.pages.state_tables import NO_STATES, StateTables
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.shards import context_parallel
from pd_connector.vllm.support import attends_ahead, gets_embeddings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class EngineFacts(NamedTuple):
    """Facts that stay the same while the engine runs.

    Attributes:
        engine_id: the engine's id. Proxies get it with the address, and consumers check it when they dial.
        windows: page sizes and sliding windows of the engine's page tables.
        ranks: the number of the engine's workers.
        produces: whether requests may offer their KV.
        consumes: whether requests may fetch their KV.
        adapters: fingerprint of the settings for adapters (`identity.inputs.adapter_settings`).
        processor: fingerprint of how images and other inputs are processed (`identity.inputs.processor_settings`).
        embeddings_come: an encode engine sends the embeddings of images and other inputs.
        attends_ahead: a token's KV depends on the whole prompt (prefix LM).
        states: which page tables list states.
        left_tokens: number of tokens at a prompt's end that the prefill side leaves to the decode engine
            (`handoff.left_tokens`).
        inputs_whole: see `handoff.left_tokens.takes_inputs_whole`.
        replays: vLLM replays a window behind a prefix hit (`pages.replayed`).
        drafts: whether the engine speculates. Engines of one model can differ in this, and then in `left_tokens`.
    """

    engine_id: str
    windows: Windows
    ranks: int
    produces: bool
    consumes: bool
    adapters: str = ""
    processor: str = ""
    embeddings_come: bool = False
    attends_ahead: bool = False
    states: StateTables = NO_STATES
    left_tokens: int = 0
    inputs_whole: bool = False
    replays: bool = False
    drafts: bool = False

    @property
    def may_leave_tokens(self) -> bool:
        """Whether engines of this model may leave tokens."""
        return self.drafts or self.left_tokens > 0

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> "EngineFacts":
        """The facts in vLLM's configuration of an engine that has a `kv_transfer_config`."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        groups = kv_cache_config.kv_cache_groups
        cp_size, _ = context_parallel(vllm_config)
        drafts = vllm_config.speculative_config
        return cls(
            engine_id=transfer.engine_id,
            windows=Windows.of((group.kv_cache_spec for group in groups), cp_size),
            ranks=vllm_config.parallel_config.world_size,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            adapters=adapter_settings(vllm_config),
            processor=processor_settings(vllm_config),
            embeddings_come=gets_embeddings(vllm_config),
            attends_ahead=attends_ahead(kv_cache_config),
            states=StateTables.of(
                (group.kv_cache_spec for group in groups),
                drops_last=drafts is not None and drafts.use_eagle_block_drop(),
            ),
            left_tokens=left_tokens(vllm_config, (group.kv_cache_spec for group in groups)),
            inputs_whole=takes_inputs_whole(vllm_config),
            replays=any(group.kv_cache_spec.prefix_replay_tokens for group in groups),
            drafts=drafts is not None,
        )
