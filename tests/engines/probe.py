# SPDX-License-Identifier: Apache-2.0
"""Looks into a worker's KV cache, and damages it: loaded by `--worker-extension-cls`."""

import hashlib


class Probe:
    """Methods that vLLM's development route `/collective_rpc` can call on a worker."""

    def kv_digests(self, pages: list[int]) -> list[str]:
        """A digest of each page over all layers."""
        return [
            hashlib.blake2b(
                b"".join(
                    layer[page].flatten().view(dtype=_bytes()).numpy().tobytes()
                    for layer in self._layers()
                ),
                digest_size=16,
            ).hexdigest()
            for page in pages
        ]

    def kv_pages_with(self, digests: list[str]) -> list[bool]:
        """Whether each digest is that of any page of the cache."""
        wanted = set(digests)
        used = [p for p in range(self._layers()[0].shape[0]) if self._layers()[0][p].any()]
        found = wanted & set(self.kv_digests(used))
        return [digest in found for digest in digests]

    def damage_page(self, page: int) -> None:
        """Negate every element of a page in every layer."""
        for layer in self._layers():
            layer[page].neg_()

    def _layers(self):
        return self.model_runner.kv_caches


def _bytes():
    import torch

    return torch.uint8
