# SPDX-License-Identifier: Apache-2.0
"""A mock engine with vLLM's HTTP and KV events. It computes nothing, and takes its times from the cost model.

In reading order: `events` (KV events over ZMQ), `clock` (drives a `SimulatedEngine` by the wall clock), `server` (the
endpoints, with the token ids of a request and the form of the answers), `command`.
"""
