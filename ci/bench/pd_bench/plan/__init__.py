# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan`: the planner's search beside an exhaustive one and beside papers, in the simulator.

- `stock`: the model, its estimated costs, and the inventories
- `scaling`: numbers of engines that follow the load; `scaling_rules`: what they are compared with
- `searches`: exhaustive search, and a plan of one half of a trace that is judged on the other
"""
