# SPDX-License-Identifier: Apache-2.0
"""One router in several equal processes, its workers.

One Python process serves a few hundred requests a second. With `--workers N`, N processes listen on one port
(SO_REUSEPORT). Each is a whole router with an index of its own, and tells the others its load (`peer_routers`). The
first also serves the admin API and talks to other routers. `supervisor` starts workers and restarts workers that end;
`worker` is a single worker.
"""
