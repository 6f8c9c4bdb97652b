# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank: one thread that owns every socket, slot and session.

- `agent` is what an engine's threads call; `commands` is what they say; `loop` is the thread's loop.
- `producing/`: `producer_side`, with `consumer_sessions` and `send_pipeline` (chunks on their way out).
- `consuming/`: `consumer_side`, with `session_keeper`, `open_sessions` and `receive_pipeline` (chunks on their way in).
- Both need: `handshake`, `page_gate` (pages that the engine may take back), `resources` (what a rank has), `metrics`.
- The agent alone needs: `pending_outcomes` (what is reported if the thread dies), `agent_thread` (the thread, and whether it hangs).
"""
