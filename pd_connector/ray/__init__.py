# SPDX-License-Identifier: Apache-2.0
"""The door to Ray Serve LLM: PDConnector as one of the connectors of its prefill/decode applications.

| file | what is in it |
|---|---|
| `app.py` | `build_pd_app` for the `import_path` of a Serve config, and `register` for Ray's own builder |
| `backend.py` | what Ray asks a connector: a replica's address, and the two requests of a handoff |
| `servers.py` | the two deployments of `build_pd_app`: what they do when the other side is not there |
| `ingress.py` | the deployment that clients talk to: a second chance where a decode replica dies |
| `carried.py` | which requests one transfer can carry |
| `binding.py` | how long a request waits for a prefill replica |
| `published.py` | how the address of an engine comes into its replica's process |

Ray chooses replicas, starts and stops them. KV moves between their engines as it does without Ray.
"""

from pd_connector.ray.app import build_pd_app, register
from pd_connector.ray.backend import PDConnectorBackend

__all__ = ["PDConnectorBackend", "build_pd_app", "register"]
