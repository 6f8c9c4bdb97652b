# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank: one thread that owns every socket, slot and session.

- `agent`: what an engine's threads call. `commands`: what they submit. `loop`: the thread's loop.
- `producing/`: `producer_side`, with `consumer_sessions` and `send_pipeline` (chunks on their way out).
- `consuming/`: `consumer_side`, with `session_keeper`, `open_sessions` and `receive_pipeline` (chunks on their way in).
- Both use `handshake`, `page_gate` (pages that the engine takes back), `resources` (shared objects of a rank), `metrics`.
- Only `agent` uses `pending_outcomes` (reports that fail if the thread dies) and `agent_thread` (the thread itself).
"""
