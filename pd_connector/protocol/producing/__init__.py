# SPDX-License-Identifier: Apache-2.0
"""The producer's state machine: which pages are leased to which consumers, and which chunk is sent next.

`producer` takes the engine's offers and leases pages. `openings` takes consumers' requests. `send_queue` finds the next
chunk. `outgoing*` are their records: of a transfer, of a stream (one consumer rank's part of it), and of a chunk.
"""
