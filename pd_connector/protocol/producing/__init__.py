# SPDX-License-Identifier: Apache-2.0
"""The producer's state machine: which pages are leased to whom, and what is sent next.

`producer` takes the engine's offers and leases pages; `openings` takes what consumers ask for;
`send_queue` finds the next chunk. `outgoing*` is what they know, by transfer and by stream.
"""
