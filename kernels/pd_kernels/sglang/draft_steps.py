# SPDX-License-Identifier: Apache-2.0
"""Decodes a draft model: several tokens of each request in a row, before the model verifies them.

SGLang's `DraftBackendFactory` knows only SGLang's own backends. Two of its plugin hooks, which
`plugin.py` registers, have it make `DraftSteps` if our backend is selected. After the model has verified
drafts, SGLang has the draft model compute them again (draft extend). That stays with the backend for
prompts, because SGLang captures CUDA graphs of it for its own backends only.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends, get_spec

from pd_kernels.sglang.backend import FixedTables, MlaBackend, PagedBackend, PageTables
from pd_kernels.sglang.refusals import NAME


class DraftSteps:
    """One backend for each step, as SGLang's draft worker takes them. Drafts have one branch.

    Attributes:
        attn_backends: the backends of the steps. The first draft comes from the model's last step, so
            there is one backend less than there are drafts.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, steps: int) -> None:
        """
        Args:
            runner: SGLang's `ModelRunner` of the draft model.
            steps: drafts of a request, at least 2.
        """
        make = MlaBackend if runner.use_mla_backend else PagedBackend
        self.attn_backends = [make(runner) for _ in range(steps - 1)]
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._page_size = runner.page_size
        self._device = runner.device
        self._fixed: FixedTables | None = None
        self._lengths: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called when drafts begin that no CUDA graph replays."""
        first = PageTables.of(
            forward_batch, self._req_to_token, self._page_size, len(self.attn_backends)
        )
        lengths = first.lengths - len(self.attn_backends)
        for step, backend in enumerate(self.attn_backends, 1):
            backend.begin(PageTables(first.table, lengths + step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.make_room(max_bs)
        tokens, steps = self._req_to_token.shape[1], len(self.attn_backends)
        self._fixed = FixedTables(max_bs, tokens, self._page_size, self._device)
        self._lengths = torch.ones(steps, max_bs, dtype=torch.int32, device=self._device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Called for drafts that are captured or replayed. Tables and plans keep their addresses."""
        assert self._fixed is not None, "SGLang calls init_cuda_graph_state first"
        assert self._lengths is not None
        first = self._fixed.fill(forward_batch, self._req_to_token)
        for step, backend in enumerate(self.attn_backends, 1):
            lengths = self._lengths[step - 1, : len(first.lengths)]
            torch.add(first.lengths, step, out=lengths)
            backend.begin(PageTables(first.table, lengths))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is left to be done in the graph."""


def around_decode(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_decode_backend`."""
    if (factory.draft_attn_backend or attention_backends()[1]) != NAME:
        return original(factory)
    steps: int = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, steps) if steps > 1 else None


def around_draft_extend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_draft_extend_backend`."""
    prompts, decodes = attention_backends()
    named = factory.draft_attn_backend
    if named or decodes != NAME or get_spec().speculative_attention_mode != "decode":
        return original(factory)
    factory.draft_attn_backend = prompts
    try:
        return original(factory)
    finally:
        factory.draft_attn_backend = named
