# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which drafts a draft sees while SGLang's model verifies them.

Drafts of one branch (a chain) see all drafts before them, as causality says. Drafts of several
branches (a tree) are in the cache one after another, and each sees its ancestors only.
"""

from typing import Any

import torch
import triton.language as tl
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from pd_kernels.attention import Mod


class DraftTree:
    """The mask of a step, which SGLang's own kernel fills, and the mask mod that reads it.

    Attributes:
        mask: SGLang's record of the buffer: bool, `[requests, drafts, drafts]` in one axis, whether
            a draft sees another.
        mod: hides drafts that are not a draft's ancestors.
    """

    def __init__(self, requests: int, drafts: int, branches: bool, device: Any) -> None:
        """
        Args:
            requests: the most requests of a batch.
            drafts: tokens of a request that are verified at a time.
            branches: whether anybody reads the mask. SGLang fills it in any case.
            device: the device of the cache.
        """
        seen = torch.ones(requests * drafts * drafts, dtype=torch.bool, device=device)
        self._drafts = drafts
        self._first = torch.zeros(requests, dtype=torch.int32, device=device)
        self.mask = VerifyMask(seen, TreeMaskMode.QLEN_ONLY, requests, is_read=branches)
        args = (seen.view(torch.uint8), self._first, drafts)
        self.mod = Mod.of(_ancestor, args, _ancestor_reference)

    def begin(self, lengths: torch.Tensor, spec_info: Any) -> None:
        """Begin a step. `lengths` are tokens of KV of each request, the drafts included."""
        self._first[: len(lengths)] = lengths - self._drafts
        self.take(spec_info)

    def take(self, spec_info: Any) -> None:
        """Use the mask of SGLang's `EagleVerifyInput`. Dummies and idle ranks have no drafts, and any mask.

        Raises:
            RuntimeError: the mask has another form than `mask` asks for.
        """
        drafts = getattr(spec_info, "draft_token", None)
        if not self.mask.is_read or drafts is None or not drafts.numel():
            return
        given, own = spec_info.custom_mask, self.mask.buffer
        if given.data_ptr() == own.data_ptr():
            return
        if given.numel() != drafts.numel() * self._drafts or given.numel() > own.numel():
            raise RuntimeError(
                f"{given.numel()} elements in the mask of {drafts.numel()} drafts: must be "
                f"{self._drafts} for each draft"
            )
        own[: given.numel()].copy_(given)


def _ancestor(b, h, q_idx, kv_idx, args):
    first = tl.load(args[1] + b)
    row = q_idx - first
    column = kv_idx - first
    place = (b * args[2] + row) * args[2] + column
    inside = (row >= 0) & (column >= 0)
    return (column < 0) | (tl.load(args[0] + place, mask=inside, other=0) != 0)


def _ancestor_reference(b, h, q_idx, kv_idx, args):
    first = args[1][b]
    row, column = q_idx - first, kv_idx - first
    place = ((b * args[2] + row) * args[2] + column).clamp(0, len(args[0]) - 1)
    return (column < 0) | ((row >= 0) & args[0][place].bool())
