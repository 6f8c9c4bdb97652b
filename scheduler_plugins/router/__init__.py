# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode router: one OpenAI API in front of prefill and decode engines.

In reading order: `config` (every setting), `engines` (one engine as the router knows it), `pool` (all
engines, and the tasks that watch them), `policies` (which engines serve a request; pure), `load` and `view`
(what policies see), `describe` (a request as policies see it), `body` (what each side is sent), `answers`
(what the client is sent), `exchange` (one request to one engine, watched), `prefill` (the prefill side of an
attempt), `downstream` (the client's side), `attempt` and `proxy` (one client request's life), `app` (the endpoints), `connections` (what clients may hold), `server` (all of it on a socket), `metrics`.
"""
