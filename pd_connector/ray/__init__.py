# SPDX-License-Identifier: Apache-2.0
"""The door to Ray Serve LLM: PDConnector as one of the connectors of its prefill/decode applications.

| file | what is in it |
|---|---|
| `app.py` | `build_pd_app` for the `import_path` of a Serve config, and `register` for Ray's own builder |
| `backend.py` | Ray's calls to a connector: a replica's address, and the two requests of a handoff; how an engine's address reaches its replica's process |
| `servers.py` | the deployments of `build_pd_app`: prefill, decode, and the ingress that clients call; how long a request waits for a prefill replica, and what is done without one |
| `carried.py` | which requests one transfer can carry |

Ray chooses, starts and stops replicas. KV moves between their engines as it does without Ray.
"""

from pd_connector.ray.app import build_pd_app, register
from pd_connector.ray.backend import PDConnectorBackend

__all__ = ["PDConnectorBackend", "build_pd_app", "register"]
