# SPDX-License-Identifier: Apache-2.0
"""One router in several processes: the keeper and its workers.

One Python process serves a few hundred requests a second. With `--workers N`, the *keeper* watches the engines, owns
the index and the admin API, and starts N *workers*. The workers listen on one port (SO_REUSEPORT) and serve clients.

In reading order: `messages` and `link` (messages between keeper and worker), `state` (one engine in such a message),
`tables` (the index as workers read it), `mirror` (the engines as a worker knows them), `merging` (one `/metrics` for
all processes), `worker`, `child` (one worker as its keeper sees it) and `keeper`. The package `fellows` has the
shared counts and the exchange between routers.
"""
