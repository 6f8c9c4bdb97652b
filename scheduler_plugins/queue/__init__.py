# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests inside an engine. No clock, no engine, no I/O.

One `pop`, in reading order: `waiting` (the queue that an engine asks) lets `fair_share` choose a class,
takes the request with the smallest key from that class's `class_queue` (kept in a `lazy_heap`), and
keeps the keys true by `prefix_index`, which knows whose cached prefix has changed. `work` counts what
waits, for admission. `batch` says whether more may start beside what has started, and `guards` keeps lower
classes out of the steps of a request that is owed. `turned_back` remembers who found no room.
`step_length` says how many tokens a step gets.
"""
