# SPDX-License-Identifier: Apache-2.0
"""The program of either process of `bench handoff --gpu`: `python -m pd_bench.gpu.party SOCKET ROLE DEVICE`."""

import sys
from typing import Any

import torch

from pd_bench.gpu.cache import GpuCache
from pd_bench.gpu.movers import Collated, PerPage
from pd_bench.kernels.caches import Model
from pd_bench.party import Party, obey
from pd_connector.tools.wire import WireAgent


class GpuParty(Party):
    """A cache on a device, a new one for each model and prompt length."""

    cache: GpuCache | None = None

    def __init__(self, role: str, device: str) -> None:
        self._role = role
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", self._device.index or 0)
            torch.cuda.set_device(self._device)

    def open(self, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The kind is `pages`, `collated` or `agent`; the settings also name model and prompt."""
        cache = self._filled(Model(**settings["model"]), settings["tokens"])
        if kind == "pages":
            self.mover = PerPage(self._role, cache)
        elif kind == "agent":
            self.mover = WireAgent(self._role, cache, settings["config"])
        else:
            self.mover = Collated(
                self._role,
                cache,
                settings["codec"],
                slots=settings["slots"],
                slot_bytes=settings["slot_bytes"],
            )
        return self.mover.address()

    def _filled(self, model: Model, tokens: int) -> GpuCache:
        """The cache for this model and prompt length; there is one at a time."""
        if self.cache is None or (self.cache.model, self.cache.tokens) != (model, tokens):
            self.cache = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self.cache = GpuCache(self._role, model, tokens, self._device)
        return self.cache


def main(path: str, role: str, device: str) -> None:
    obey(GpuParty(role, device), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
