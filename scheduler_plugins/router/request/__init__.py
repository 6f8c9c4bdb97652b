# SPDX-License-Identifier: Apache-2.0
"""The life of a request: from the routing decision through its attempts to the client's last token.

| modules | what they are |
|---|---|
| `proxy` | the client's request: attempts until one has answered |
| `asked` | the request as engines and policies see it |
| `turns`, `decision` | its wait at the front, and the engines of its next attempt |
| `dispatch` | one attempt: what its engines are sent |
| `responder`, `stream`, `aborts` | an engine's answer on its way to the client, the events of a streamed one, and whether an early end was wanted |
| `resumable` | which streams can go on at another engine |
| `resume`, `tail` | the part of a stream that was sent, and how another engine goes on |
| `shared` | the objects that all requests share |
"""
