# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests inside an engine. No clock, no engine, no I/O.

One `pop`, in reading order: `waiting` is the queue that an engine asks. `fair_share` chooses a class. The class's
`class_queue`, a `lazy_heap`, gives the request with the smallest key. `prefix_index` keeps keys correct: it finds the
requests whose cached prefix has changed. `work` counts waiting work, for admission. `batch` decides whether more
requests may start in this step, and keeps lower classes out of the steps of a request that is owed. `turned_back`
remembers requests that found no room. `step_length` sets the tokens of a step.
"""
