# SPDX-License-Identifier: Apache-2.0
"""The embedded transport: plain TCP sockets, encrypted and authenticated when a key is set.

In the order in which a reader meets them:

    address.py     facts for peers: a numeric address, and a secret for the keys
    frames.py      every frame on the wire, with its limits
    sealing.py     tags: a record opens only as the peer's next record
    cipher.py      keys of one connection, and how they seal its records
    sums.py        records with a checksum, where no key is set
    segments.py    memory of sealed records on their way
    sending.py     from a send slot to the socket
    receiving.py   from the socket into landing memory (landing.py), and the resulting events (events.py)
    connection.py  one connection that stands: both of these, heartbeats, acknowledgements
    listening.py   the port of a producer, and connections that are not authenticated yet
    consumer.py    a producer's view of one consumer: its links, and the writes to it
    producer.py    a consumer's view of one producer: it dials, and dials again
    watch.py       which sockets are ready
    transport.py   the seam (`pd_connector/transport/base.py`)

The producer listens and each consumer dials it, so that only producers need reachable ports. Two
transports have one connection, which all sessions between them share. Everything here is used by
the agent's thread.
"""

from pd_connector.transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
