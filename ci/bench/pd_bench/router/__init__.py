# SPDX-License-Identifier: Apache-2.0
"""`bench router`: our router beside others, in front of mock engines, under a recorded trace.

- `scaled`: the trace and the engines, made smaller without changing what happens
- `mocks`: mock engines as processes
- `contenders`: the routers that are compared, as processes
- `sending`: the trace, sent in time, and how each request was answered
- `rotations`: each router with the same requests in front of fresh engines
- `truth`: the simulator beside a live run
- `roles/`: role policies in the simulator
- `deaths`, `overload`, `two`: engines that are killed, twice the load, two routers
"""
