# SPDX-License-Identifier: Apache-2.0
"""What the two sides say to each other, and the two state machines that decide what is said.

- Said: `messages` (control), `header` (of a chunk), `params` (`kv_transfer_params`), `peers` (addresses).
- The producer: `producer` takes the engine's offers and leases pages; `openings` takes what consumers ask
  for; `send_queue` finds the next chunk. `outgoing*` is what they know, by transfer and by stream.
- The consumer: `consumer` takes the engine's loads and holds; `fetches` asks producers and ends transfers;
  `landings` decides which chunk is believed; `grants` lends landing slots. `incoming*` is what they know.
"""
