# SPDX-License-Identifier: Apache-2.0
"""UCX through ucxx: tagged messages over RDMA where there is any, else over shared memory or TCP.

- `address`: the address that peers get, and the beginning of a message
- `worker`: UCX's workers, with the listening sockets that UCX may close: the one that peers dial now, and earlier ones that still serve a peer
- `transport`: the transport itself
"""

from pd_connector.transport.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
