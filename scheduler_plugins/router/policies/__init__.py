# SPDX-License-Identifier: Apache-2.0
"""Policies of the router: which engines serve a request. No I/O, no clock, no engine, no HTTP.

The live router and the simulator run the same objects. `base` is the interface, `sides` joins a
rule for prefill with a rule for decode, and `registry` names the policies. `load_rules` and
`affinity_rules` have simple rules; every other module is one policy or rule.
"""
