# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode router: one OpenAI API in front of prefill and decode engines.

In reading order:

| modules | what they are |
|---|---|
| `config`, `settings_file`, `reload` | every setting, the same from a YAML file, and what happens when that file has changed |
| `engines`, `ranks`, `kinds`, `members` | one engine as the router knows it, its data-parallel ranks, vLLM's and SGLang's, names that stand for several |
| `watch`, `engine_set`, `pool`, `circuit` | the task that watches one, all engines, when one gets a pause |
| `counted_load`, `others`, `engine_reports` | what engines are busy with: counted here, told by other routers, told by engines |
| `index`, `caches` | what engines have cached |
| `policies`, `view` | which engines serve a request (pure), and what policies see |
| `body`, `describe`, `promises`, `tokens`, `token_worker` | what the client sent, as policies see it, what its class is promised, its tokens |
| `handoff`, `pairing`, `prompt_ids` | what each side is sent, who can work with whom, the prompt as the decode engine reads it |
| `exchange`, `prefill`, `first_token` | one request to one engine, watched; the prefill side of an attempt; what the decode engine's answer lacks |
| `attempt`, `candidates`, `decision`, `front`, `turns` | where a request goes next, and who waits at the router |
| `downstream`, `responder`, `answers`, `resume` | the client's side, and streams that go on at another engine |
| `shared`, `proxy` | what all requests share, and the life of one |
| `backend`, `app_keys`, `app`, `telling`, `page`, `refusals`, `admin` | the endpoints |
| `doors`, `connections`, `tls` | who may come in, and what clients may hold |
| `tracing`, `metrics` | what is told of requests |
| `server`, `loop`, `workers` | all of it on a socket, in several processes, and several routers |
"""
