# SPDX-License-Identifier: Apache-2.0
"""The door to Ray Serve: our route policies choose among a deployment's replicas.

In a deployment's config: `request_router_config: {request_router_class:
"scheduler_plugins.ray:PolicyRequestRouter", request_router_kwargs: {policy: cache_aware}}`.

| file | what is in it |
|---|---|
| `fleet.py` | the replicas as policies see them, and the requests sent to each; without Ray | | `request_router.py` |
the router that Serve calls |
"""

from scheduler_plugins.ray.request_router import PolicyRequestRouter

__all__ = ["PolicyRequestRouter"]
