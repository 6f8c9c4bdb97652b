# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` in each of its processes,
before it reads its arguments."""

from typing import Any

from pd_kernels.sglang.refusals import NAME


def register() -> None:
    """Make `--decode-attention-backend pd_kernels` known.

    May be called several times. Nothing changes for an engine that does not select it.
    """
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make)


def _make(runner: Any) -> Any:
    from pd_kernels.sglang.backend import MlaBackend, PagedBackend

    return (MlaBackend if runner.use_mla_backend else PagedBackend)(runner)
