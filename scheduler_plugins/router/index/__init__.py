# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks of KV by engine.

In reading order: `hashes` (names of blocks); `table_reader`, `retired`, `fixed_table` and `table` (a hash table of
64-bit keys: look-ups, return of memory, writes, growth in pieces); `blocks` (`BlockIndex`: blocks by engine, and the
part of a prompt that each has); `events` (KV events of engines); `held` (applies one engine's events);
`batch_numbers` (finds missing events); `recent` (a guess for engines without events); `prefixes` (the whole index, as
policies use it); `follower` (the only I/O: receives events over ZeroMQ).
"""
