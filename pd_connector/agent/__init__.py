# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank: one thread that owns every socket, slot and session.

- `agent` is what an engine's threads call; `commands` is what they say; `loop` is the thread's loop.
- Producing: `producer_side`, with `consumer_sessions`, `chunk_sender` and `outbox` (send slots).
- Consuming: `consumer_side`, with `session_keeper`, `open_sessions` and `inbox` (chunks that came).
- Both: `handshake`, `page_gate` (pages that the engine may take back), `owed` (what is reported if the
  thread dies), `outage` (no KV arrives), `metrics`.
"""
