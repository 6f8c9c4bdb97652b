# SPDX-License-Identifier: Apache-2.0
"""The planner: which engines to start on which GPUs, found in the simulator.

| modules, in reading order | what they are |
|---|---|
| `devices`, `estimate` | data sheets, and an engine's profile from a model's config and a data sheet |
| `inventory`, `mix` | what there is, and how many engines of each kind do what and where |
| `bound`, `front` | closed forms, and the mixes that no other mix beats by them |
| `goodput` | the highest rate that keeps the promise in every window of a trace |
| `search`, `colocated`, `papers/` | our search, engines that do both, and the searches of papers |
| `plan` | all searches, and which fleet is recommended |
| `files`, `page`, `command` | what is written: files, a page, a table |
| `folder` | whether the files of a folder still belong together |
"""
