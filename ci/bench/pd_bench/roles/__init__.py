# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench roles`: role policies in the simulator, beside fixed ratios and an oracle.

- `fleets`: the simulated engines and their promises
- `play`: one run, the largest rate that keeps the promises, and the best fixed ratio; `arrow_paper`: a policy as published
- `shift`: the traffic changes once; `steady`: it does not, or swings; `dop`: prefill engines of unlike parallelism
- `decision_cost`, `request_cost`: the CPU time of one decision, and of a request with and without roles
"""
