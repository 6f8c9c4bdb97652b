# SPDX-License-Identifier: Apache-2.0
"""The system finds out that the other end of a TCP connection has gone without a word."""

import zmq

IDLE_S, INTERVAL_S, PROBES = 5, 2, 3
"""After `IDLE_S` seconds without a byte the system asks, `PROBES` times, each `INTERVAL_S` seconds apart. Then
it ends the connection."""


def keep_alive(control: "zmq.Socket[bytes]") -> None:
    """Let the system ask so for every connection that this socket will have."""
    control.setsockopt(zmq.TCP_KEEPALIVE, 1)
    control.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    control.setsockopt(zmq.TCP_KEEPALIVE_INTVL, INTERVAL_S)
    control.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
