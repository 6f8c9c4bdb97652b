# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: a whole serving stack beside another, under the load of a recorded trace.

- `trace`: the requests, and their times
- `sending`: sends requests at their times, and records each answer
- `stack`: engines with their router; ours and the rival
- `measure`: measures both stacks in turn, and compares them
- `pool`: a stack with a KV pool beside one without, and after its engines have died
- `bench`: starts the stacks, measures, and ends them
"""
