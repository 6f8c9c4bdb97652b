# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: a whole serving stack beside another, under the load of a recorded trace.

- `trace`: what is sent, and when
- `sending`: requests sent at their times, and how each was answered
- `stack`: engines with their router; ours and the rival
- `measure`: rounds of both stacks in turn, and what they tell together
- `bench`: starts the stacks, measures, and ends them
"""
