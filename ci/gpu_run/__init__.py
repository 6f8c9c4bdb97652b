# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu`: runs steps on a GPU host, each in a separate process.

It needs only Python's standard library, because the host may have no package index.

- `step`: a step and its needs
- `steps`: the steps in their order
- `bundle`: packs packages and this tree for a host without a package index (`ci/offline_bundle`)
- `parts`: packages that were carried to the host
- `probe`: the first step: the machine and its copy speed
- `runner`: runs the steps that fit the time, and keeps every result at once
- `record`: the results, as JSON and as text
- `processes`: a program with a time limit, ended with all its child processes
- `command`: the command line
"""
