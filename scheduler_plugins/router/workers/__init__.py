# SPDX-License-Identifier: Apache-2.0
"""One router in several processes, and several routers that know of each other's work.

One Python process serves a few hundred requests a second. With `--workers N` the *keeper* watches the engines, owns the index and the admin
API, and starts N *workers*, which listen on one port (SO_REUSEPORT) and serve clients.

In reading order: `memory` (memory that processes share), `counts` and `slots` (what each process has sent to each engine), `fellows` (the same
between machines), `messages` and `link` (what keeper and worker tell each other), `state` (an engine as the keeper tells of it), `tables` (the
index as workers read it), `mirror` (the engines as a worker knows them), `merging` (one `/metrics` for all), `worker`, `child` (one worker
as its keeper has it) and `keeper`.
"""
