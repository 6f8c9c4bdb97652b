# SPDX-License-Identifier: Apache-2.0
"""The door to SGLang: `--decode-attention-backend pd_kernels` decodes with the kernels of
`pd_kernels.attention`. SGLang's own backend, `--attention-backend`, computes prompts.

`plugin.py` is the entry point. `backend.py` holds the two backends, keys and values or MLA, and
their block tables, made from SGLang's token tables; `draft_tree.py` has the mask of drafts that are
verified, `draft_steps.py` the backends of a draft model. `refusals.py` lists unsupported cases.
"""
