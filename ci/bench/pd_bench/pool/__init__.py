# SPDX-License-Identifier: Apache-2.0
"""`bench pool`: the KV pool beside computing, beside the engine's own cache, and beside another store.

- `raw_party`, `raw`: objects of another process, without engines
- `lookups`: how soon a look-up is ready, and how soon the store is
- `disk`: chunks of the disk tier beside raw reads
- `trace`: how much of a trace's prompts is found, with several processes that save
- `slow`, `slow_connector`, `faulty_store`: engines whose store is slow or silent
- `sglang`: SGLang engines with a pool, and one without a linker
- `cross`: a vLLM and an SGLang engine behind our router
- `engines`, `measure`: vLLM engines with one pool, and one engine without
"""
