# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` in each of its processes,
before it reads its arguments."""

from typing import Any

from pd_kernels.sglang.refusals import NAME

_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
"""SGLang's maker of backends for a draft model, whose lists of names are closed."""


def register() -> None:
    """Make `--decode-attention-backend pd_kernels` known.

    May be called several times. Nothing changes for an engine that does not select it.
    """
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
        HookRegistry.register(f"{_DRAFTS}.create_decode_backend", _draft_decode, HookType.AROUND)
        HookRegistry.register(
            f"{_DRAFTS}.create_draft_extend_backend", _draft_extend, HookType.AROUND
        )
    register_attention_backend(NAME)(_make)


def _make(runner: Any) -> Any:
    from pd_kernels.sglang.backend import MlaBackend, PagedBackend

    return (MlaBackend if runner.use_mla_backend else PagedBackend)(runner)


def _draft_decode(original: Any, factory: Any) -> Any:
    from pd_kernels.sglang.draft_steps import around_decode

    return around_decode(original, factory)


def _draft_extend(original: Any, factory: Any) -> Any:
    from pd_kernels.sglang.draft_steps import around_draft_extend

    return around_draft_extend(original, factory)
