# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which drafts a draft sees while SGLang's model verifies them.

Drafts of one branch (a chain) see all drafts before them, as causality says. Drafts of several
branches (a tree) are in the cache one after another, and each sees its ancestors only. A window
counts the tokens of a draft's own branch, so that a draft sees what it would see in a chain.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton.language as tl
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from pd_kernels.attention import Mod


class DraftTree:
    """The mask of a step, which SGLang's own kernel fills, and the forms in which kernels read it.

    Attributes:
        mask: SGLang's record of the buffer: bool, `[requests, drafts, drafts]` in one axis, whether
            a draft sees another.
        words: int32 `[requests, drafts]`, which drafts a draft sees, as `mla_decode` takes them.
    """

    def __init__(
        self,
        requests: int,
        drafts: int,
        branches: bool,
        device: Any,
        windows: Iterable[int] = (),
    ) -> None:
        """
        Args:
            requests: the most requests of a batch.
            drafts: tokens of a request that are verified at a time.
            branches: whether anybody reads the mask. SGLang fills it in any case.
            device: the device of the cache.
            windows: the windows of the model's layers, in tokens; 0 for all.
        """
        seen = torch.ones(requests * drafts * drafts, dtype=torch.bool, device=device)
        self._drafts = drafts
        self._first = torch.zeros(requests, dtype=torch.int32, device=device)
        self.mask = VerifyMask(seen, TreeMaskMode.QLEN_ONLY, requests, is_read=branches)
        self._bits = 2 ** torch.arange(drafts, dtype=torch.int32, device=device)
        self.words = self._bits.sum(dtype=torch.int32).repeat(requests, drafts)
        # Tokens of a draft's branch from the first draft on, itself included.
        self._ranks = torch.full((requests, drafts), drafts, dtype=torch.int32, device=device)
        args = (seen.view(torch.uint8), self._first, drafts)
        branch = (*args, self._ranks.view(-1))
        self._mods = {
            window: Mod.of(_near_ancestor, (*branch, window), _near_ancestor_reference)
            if window
            else Mod.of(_ancestor, args, _ancestor_reference)
            for window in windows
        }

    def mod(self, window: int) -> Mod:
        """Hides drafts that are not a draft's ancestors, and tokens before its window. `window` is one of `windows`."""
        return self._mods[window]

    def reach(self, window: int) -> int:
        """A window for `paged_decode`, which counts places in the cache, and not those of a branch: all tokens that
        `mod(window)` does not hide are in it."""
        return window + self._drafts - 1 if window else 0

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
        if given.data_ptr() != own.data_ptr():
            if given.numel() != drafts.numel() * self._drafts or given.numel() > own.numel():
                raise RuntimeError(
                    f"{given.numel()} elements in the mask of {drafts.numel()} drafts: must be "
                    f"{self._drafts} for each draft"
                )
            own[: given.numel()].copy_(given)
        count = drafts.numel() // self._drafts
        seen = own[: count * self._drafts**2].view(count, self._drafts, self._drafts)
        torch.sum(seen, 2, dtype=torch.int32, out=self._ranks[:count])
        torch.sum(seen * self._bits, 2, dtype=torch.int32, out=self.words[:count])


def _ancestor(b, h, q_idx, kv_idx, args):
    first = tl.load(args[1] + b)
    row = q_idx - first
    column = kv_idx - first
    place = (b * args[2] + row) * args[2] + column
    inside = (row >= 0) & (column >= 0)
    return (column < 0) | (tl.load(args[0] + place, mask=inside, other=0) != 0)


def _near_ancestor(b, h, q_idx, kv_idx, args):
    first = tl.load(args[1] + b)
    row = q_idx - first
    column = kv_idx - first
    place = (b * args[2] + row) * args[2] + column
    inside = (row >= 0) & (column >= 0)
    seen = (column < 0) | (tl.load(args[0] + place, mask=inside, other=0) != 0)
    own = tl.load(args[3] + b * args[2] + row, mask=row >= 0, other=0)
    other = tl.load(args[3] + b * args[2] + column, mask=column >= 0, other=0)
    return seen & (tl.where(column < 0, column + 1, other) > own - args[4])


def _near_ancestor_reference(b, h, q_idx, kv_idx, args):
    first = args[1][b]
    row, column = q_idx - first, kv_idx - first
    own = args[3][b * args[2] + row.clamp(min=0)]
    other = args[3][b * args[2] + column.clamp(min=0)]
    near = torch.where(column < 0, column + 1, other) > own - args[4]
    return near & _ancestor_reference(b, h, q_idx, kv_idx, args)


def _ancestor_reference(b, h, q_idx, kv_idx, args):
    first = args[1][b]
    row, column = q_idx - first, kv_idx - first
    place = ((b * args[2] + row) * args[2] + column).clamp(0, len(args[0]) - 1)
    return (column < 0) | ((row >= 0) & args[0][place].bool())
