# SPDX-License-Identifier: Apache-2.0
"""The life of a request: from the decision through the streams of its attempts to the client's last token.

| modules | what they are |
|---|---|
| `proxy` | the client's request: attempts until one has answered |
| `asked` | what engines are asked for it, and policies told |
| `turns`, `decision` | its wait at the front, and the engines of its next attempt |
| `dispatch` | one attempt: what its engines are sent |
| `responder`, `aborts` | an engine's answer on its way to the client, and whether somebody wanted that it ended early |
| `resumable`, `resume`, `tail` | which streams can go on at another engine, what a client was sent of one, and how the other engine goes on with it |
| `shared` | what all requests have in common |
"""
