# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM: attention backends that decode with the kernels of `pd_kernels.attention`.
Everything else is left to the vLLM backend that they replace (the stock backend).

`plugin.py` is the entry point. `paged_*.py` is attention with keys and values, `mla_*.py` is MLA.
`refusals.py` says what is not supported, `batch_split.py` splits a batch into decodes and the rest.
"""
