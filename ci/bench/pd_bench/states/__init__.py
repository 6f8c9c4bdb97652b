# SPDX-License-Identifier: Apache-2.0
"""`bench states`: models with recurrent states, drafts, and context parallelism.

- `model`: a Qwen3-Next to measure, and the bytes of its KV and states
- `rows`: the rows with engines
- `step_probe`: when states land in a decode engine, and when its next step begins
- `stripes`: context parallelism between agents, without engines
"""
