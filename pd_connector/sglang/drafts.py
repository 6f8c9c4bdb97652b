# SPDX-License-Identifier: Apache-2.0
"""SGLang's draft model (speculative decoding): its pool, its weights, and the form of its first drafts.

A decode engine continues drafting from the results of the prefill engine's draft model: KV of the prompt, and, with the
first token, a hidden state and the likeliest next tokens. So both engines need the same draft model.
"""

import hashlib
import logging
from typing import Any, NamedTuple

import torch

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.kv.checkpoint import read_config
from pd_connector.kv.model import draft_fingerprint
from pd_connector.kv.model_config import served_config
from pd_connector.protocol.wire.final_token import draft_form
from pd_connector.sglang.cache import DraftPool
from pd_connector.sglang.model import (
    checkpoint_files,
    checkpoint_folder,
    kv_heads,
    kv_scales,
)

logger = logging.getLogger("pd_connector.sglang")

_MEND = "use EAGLE, EAGLE3 or NEXTN with one draft model, or leave --speculative-algorithm out"


class Drafts(NamedTuple):
    """The draft model of a rank.

    Attributes:
        cache: its KV pool.
        runner: SGLang's `ModelRunner`.
        tokens: number of tokens of a first draft.
        vocabulary: size of the draft model's vocabulary: the first number that is not a token of a first draft.
        form: form of first drafts (`protocol.wire.final_token.draft_form`).
    """

    cache: DraftPool
    runner: Any
    tokens: int
    vocabulary: int
    form: str


def drafts_of(queue: Any) -> Drafts | None:
    """The draft model of an engine; None if it does not draft.

    Args:
        queue: SGLang's queue, which has the pools and the metadata buffers.

    Raises:
        ConfigError: it drafts in a way that cannot be moved.
    """
    from sglang.srt.runtime_context import get_spec

    scheduler = queue.scheduler
    if getattr(scheduler, "draft_worker", None) is None:
        return None
    pool, runners = queue.draft_token_to_kv_pool, scheduler.draft_worker._draft_model_runners()
    if pool is None:
        raise ConfigError(f"a draft model without a KV pool of its own: {_MEND}")
    if len(runners) != 1:
        raise ConfigError(
            f"{len(runners)} draft models: PDConnector hands over the KV of one; {_MEND}"
        )
    hidden = queue.metadata_buffers.output_hidden_states
    tokens = int(get_spec().speculative_eagle_topk)
    dtype = str(hidden.dtype).removeprefix("torch.")
    hot = _token_map(scheduler.draft_worker)
    form = draft_form(tokens, hidden.shape[1], dtype, "none" if hot is None else _digest(hot))
    vocabulary = int(scheduler.model_config.vocab_size) if hot is None else len(hot)
    model = runners[0].model
    cache = DraftPool(pool, kv_heads(model), kv_scales(model))
    return Drafts(cache, runners[0], tokens, vocabulary, form)


def _token_map(worker: Any) -> torch.Tensor | None:
    """Maps each token id of the draft model to the model's token id (`--speculative-token-map`, or EAGLE3's own map);
    None if the ids are the same."""
    token_map: torch.Tensor | None = getattr(worker.draft_worker, "hot_token_id", None)
    return token_map


def _digest(token_map: torch.Tensor) -> str:
    octets = token_map.to("cpu", torch.int64).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(octets).hexdigest()[:32]


def draft_model(drafts: Drafts | None, settings: Config) -> DraftFiles | bytes:
    """The draft model's files, still to be read, or its fingerprint if it has no files. Empty if there is no draft
    model, or if its weights are unknown: then the engine takes no KV."""
    if drafts is None:
        return b""
    model = drafts.runner.model_config
    try:
        folder = checkpoint_folder(model.model_path, model.revision)
        config = {} if folder is None else read_config(folder).config
        config = config or model.hf_config.to_dict()
        served = served_config(
            config,
            method=str(drafts.runner.spec_algorithm.name),
            dtype=str(model.dtype),
            quantization=model.quantization,
        )
        files = checkpoint_files(drafts.runner)
    except Exception as error:  # no error of a draft model stops the engine
        logger.warning("the draft model is not known, so this engine takes no KV: %r", error)
        return b""
    if files is not None:
        return DraftFiles(served.fingerprint, (files,))
    if settings.model_id:
        return draft_fingerprint(served.fingerprint, settings.model_id.encode())
    logger.warning(
        "weights of the draft model are not files on this disk: this engine takes no KV from others, whose drafts may be "
        "other ones; set model_id (config key) on all engines that serve both models"
    )
    return b""
