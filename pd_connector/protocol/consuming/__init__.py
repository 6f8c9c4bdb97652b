# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: what is asked of whom, and which chunks are believed.

`consumer` takes the engine's loads and holds; `fetches` asks producers and ends transfers; `landings`
decides which chunk is believed; `grants` lends landing slots. `incoming*` is what they know.
`audit` compares KV with what this engine computed.
"""
