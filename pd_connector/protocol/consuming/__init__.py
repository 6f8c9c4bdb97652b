# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: from which producers it fetches KV, and which chunks it uses.

`consumer` takes the engine's loads and holds. `fetches` asks producers and ends transfers. `consumer.Landings` decides which
chunk is used. `grants` lends landing slots. `incoming*` are their records: of a transfer, of a stream (one producer
rank's part of it), and of a chunk. `audit` compares received KV with KV that this engine has computed.
"""
