# SPDX-License-Identifier: Apache-2.0
"""The wire formats: between the two sides, and between them and a proxy.

`messages` (control), `header` (of a chunk), `final_token` (the token after a prompt), `params` (`kv_transfer_params`),
`peers` (addresses). `fields` has their types and limits.
"""
