# SPDX-License-Identifier: Apache-2.0
"""Which engine has which blocks of KV cached.

In reading order: `hashes` (what a block is called), `table_reader`, `retired`, `fixed_table` and
`table` (a hash table of 64-bit keys: looking up, giving memory back, writing, growing piece by piece), `blocks` (`BlockIndex`: blocks by
engine, and how much of a prompt each has), `events` (what engines say of their caches), `held` (one engine's events,
applied), `batch_numbers` (which events are missing), `recent` (a guess, for engines that say nothing), `prefixes` (all of it, as
policies ask for it), `follower` (the only I/O: receives events over ZeroMQ).
"""
