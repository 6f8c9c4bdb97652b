# SPDX-License-Identifier: Apache-2.0
"""The life of a request: from the routing decision through its attempts to the client's last token.

| modules | what they are |
|---|---|
| `proxy` | the client's request: attempts until one has answered |
| `client_request` | the request as engines and policies see it |
| `decision` | the engines of its next attempt |
| `dispatch` | one attempt: what its engines are sent |
| `responder`, `aborts` | an engine's answer on its way to the client, and whether an early end was wanted |
| `resumable` | which streams can go on at another engine, and from which token |
| `resume`, `resumable.TokenRecord` | the sent part of a stream, and the request with which another engine goes on |
| `pace`, `request_events` | the pace of a stream's tokens, and what role policies learn of a request |
| `shared` | the objects that all requests share |
"""
