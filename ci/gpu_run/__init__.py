# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu`: runs steps on a GPU host one after another, each in a process of its own.

It needs Python's standard library alone, because the host may have no package index.

- `steps`: what is run, in which order, and what each step needs
- `probe`: the first step: what the machine is and how fast it copies
- `runner`: runs the steps that fit the time, and keeps every result at once
- `record`: the results, as a file for programs and a file for people
- `processes`: a program with a time limit, ended with all that it has started
- `command`: the command line
"""
