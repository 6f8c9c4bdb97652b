# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests inside an engine. No clock, no engine, no I/O.

One `pop`, in reading order: `waiting` is the queue that an engine asks. `fair_share` chooses a class. The class's
`class_queue`, a heap with lazy deletion, gives the request with the smallest key. `prefix_index` keeps keys correct: it finds the
requests whose cached prefix has changed. `work` counts waiting work, for admission. `step_length` sets the tokens of a
step.
"""
