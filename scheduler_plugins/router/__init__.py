# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode router: one OpenAI API in front of prefill and decode engines.

In reading order: `config` (every setting), `settings_file` (the same from a YAML file), `engines` (one engine as the router knows it), `members` (names that stand for several), `watch` (the
task that watches one), `engine_set` and `pool` (all engines), `circuit` (when one gets a pause), `policies` (which engines serve a request; pure), `load`, `others` and `view`
(what policies see), `loads` (what engines tell of their load), `index` and `caches` (what they have cached), `tokens` and `token_worker` (the tokens of
prompts), `describe` (a request as policies see it), `promises` (what its class is promised), `body` (what the client sent), `kinds` (vLLM's engines and SGLang's), `pairing`
(who can work with whom), `handoff` (what each side is sent), `prompt_ids` (the prompt as the decode engine reads it), `answers`
(what the client is sent), `exchange` (one request to one engine, watched), `prefill` (the prefill side of an
attempt), `first_token` (what the decode engine's answer lacks), `downstream` and `responder` (the client's side), `resume` (streams that
go on at another engine), `attempt`, `front` (who waits at the router), `candidates` (who may still be asked) `shared` and `proxy` (one client request's life), `backend` and `doors` (where engines and clients come from), `page` (what `GET /` shows), `app` (the endpoints), `admin` (engines join and leave), `reload` (the settings file has changed), `connections` (what clients may hold), `tls`, `tracing`, `server` (all of it on a socket), `metrics`; `workers` (the router in several processes, and several routers).
"""
