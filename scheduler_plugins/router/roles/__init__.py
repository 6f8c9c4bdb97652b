# SPDX-License-Identifier: Apache-2.0
"""Role policies of the router: which engine changes between prefill and decode, and when. No I/O, no clock, no HTTP.

The live router and the simulator run the same objects. `base` is the interface, `history` is what happened in the last
minutes, `controller` holds the guards that apply to every policy, and `registry` names the policies. `group` is what
the policies share. The other modules are policies.
"""
