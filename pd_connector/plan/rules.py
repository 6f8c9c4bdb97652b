# SPDX-License-Identifier: Apache-2.0
"""The constants by which token ranges are cut into chunks.

Both sides of a session compute the plan by themselves and must come to the same plan. So the constants belong to
the schema that the two sides have agreed on, and not to the version of the code. A newer engine plans with an older
one by the older one's rules. A change of a constant, or of its use, needs a new schema with rules of its own.
"""

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True, eq=False)
class PlanRules:
    """The constants of one schema. They are compared by identity, which is fast in keys of caches.

    Attributes:
        chunk_tokens: tokens of a chunk where there is room. A prefill step computes several chunks, so
            that they stream.
        min_chunk_tokens: tokens of a chunk, unless there are fewer or a slot is too small for one
            layer of them.
        streamed_rows: chunks that the layers of a running prefill are shared among. With fewer layers,
            each layer is a chunk.
        min_chunk_bytes: no consumer may ask for smaller chunks than this, or than a slot.
        spare_bytes: if a transfer's last page would bring this number of unwanted bytes or more, only
            the wanted tokens of that page pass.
        spare_bytes_beside_states: the same for models with states, where vLLM makes a page of KV as large as a state: of a
            thousand tokens, say.
        edge_pieces, edge_cuts: the first chunk of a transfer and its last are cut into
            `edge_pieces` pieces, and the outermost piece again, `edge_cuts` times in all. Nothing
            else runs while the first is gathered and the last is scattered, so they are small.
        whole_pieces: these pieces are whole pages, whatever the page size. Otherwise a page of a size that does not divide
            `min_chunk_tokens` (96) passes twice where it lies in two of them.
    """

    chunk_tokens: int
    min_chunk_tokens: int
    streamed_rows: int
    min_chunk_bytes: int
    spare_bytes: int
    spare_bytes_beside_states: int
    edge_pieces: int
    edge_cuts: int
    whole_pieces: bool

    @functools.cached_property
    def beside_states(self) -> "PlanRules":
        """The constants for KV of a model with states."""
        return replace(self, spare_bytes=self.spare_bytes_beside_states)


RULES: dict[int, PlanRules] = {
    1: PlanRules(
        chunk_tokens=512,
        min_chunk_tokens=128,
        streamed_rows=8,
        min_chunk_bytes=256 * 1024,
        spare_bytes=256 * 1024,
        spare_bytes_beside_states=1,
        edge_pieces=4,
        edge_cuts=2,
        whole_pieces=False,
    )
}
RULES[2] = replace(RULES[1], whole_pieces=True)
"""By schema (`protocol/wire/messages.py`). Rules of a schema that was released are never changed."""
NEWEST_RULES = RULES[max(RULES)]
