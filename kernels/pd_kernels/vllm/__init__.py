# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM: attention backends that decode with the kernels of `pd_kernels.attention`. The
vLLM backend that they replace (the stock backend) does everything else.

`plugin.py` is the entry point. `paged_*.py` is attention with keys and values, `mla_*.py` is MLA.
`refusals.py` lists unsupported cases, `batch_split.py` splits a batch into decodes and the rest.
"""
