# SPDX-License-Identifier: Apache-2.0
"""A prompt as the index knows it: the hashes of its text, of its blocks, and of its chunks in KV pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import overload

from pd_connector.pool.keys import CHUNK_TOKENS
from scheduler_plugins.router.index.hashes import Hashes, block_hashes, text_hashes
from scheduler_plugins.router.index.stored import StorePlace, chunk_hashes

NO_HASHES: Hashes = ()


class PromptKeys(Sequence[bytes]):
    """The block hashes of one prompt, for each block size that an engine uses.

    Policies see a sequence of text hashes, and pass it to the index unread.
    """

    def __init__(
        self,
        text: Iterable[bytes],
        tokens: bytes | None = None,
        extras: Sequence[bytes] = (),
        salt: str | None = None,
    ) -> None:
        """Hash nothing yet.

        Args:
            text: digests of its text, 16 bytes each (`admission.prompt.Prompt.chunks`). They are computed on first
                use, which is rare if the tokens are known.
            tokens: its token ids (`hashes.token_bytes`); None: it is not tokenized.
            extras: for its first blocks, further data that KV depends on (`hashes.prompt_extras`).
            salt: the request's cache salt, empty for none. None: no KV pool has the prompt, because its adapter is
                known only by name.
        """
        self.tokens = tokens
        self.salt = salt
        self.extras = tuple(extras)
        self._text = text
        self._by_size: dict[int, Hashes] = {}
        self._by_model: dict[str, Hashes] = {}

    @cached_property
    def _digests(self) -> tuple[bytes, ...]:
        return tuple(self._text)

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        return self._digests[index]

    @cached_property
    def text(self) -> Hashes:
        """Hashes of the prompt's text."""
        return text_hashes(self._digests)

    def blocks(self, block_tokens: int) -> Hashes:
        """Hashes of the prompt's blocks of this many tokens; empty if its tokens are not known."""
        if self.tokens is None or block_tokens < 1:
            return NO_HASHES
        hashes = self._by_size.get(block_tokens)
        if hashes is None:
            hashes = block_hashes(self.tokens, block_tokens, self.extras)
            self._by_size[block_tokens] = hashes
        return hashes

    def chunks(self, place: StorePlace) -> Hashes:
        """Hashes of the prompt's chunks in a store; empty if it cannot be there, or its tokens are not known."""
        if self.tokens is None or self.salt is None or place.chunk_tokens != CHUNK_TOKENS:
            return NO_HASHES
        hashes = self._by_model.get(place.model)
        if hashes is None:
            hashes = chunk_hashes(bytes.fromhex(place.model), self.tokens, self.salt)
            self._by_model[place.model] = hashes
        return hashes
