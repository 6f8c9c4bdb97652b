# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks of KV by engine.

In reading order: `hashes` (names of blocks); `blocks` (`BlockIndex`: blocks by engine, and the part of a prompt that
each has); `events` (KV events of engines); `held` (applies one engine's events); `recent` (a
guess for engines without events); `stored` (chunks in KV pools); `prefixes` (the whole index, as policies use it);
`follower` (the only I/O: receives events over ZeroMQ, and detects missing ones).
"""
