# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM: attention backends that decode with the kernels of `pd_kernels.attention` and leave
everything else to the backend of vLLM's that they stand in for.

`plugin.py` is the entry point. `paged*.py` is attention with keys and values, `latent*.py` MLA;
`limits.py` says what is refused, `split.py` cuts a batch into decodes and the rest.
"""
