# SPDX-License-Identifier: Apache-2.0
"""Detects that the other end of a TCP connection has gone silently: the kernel probes it, and knows which packets were
never acknowledged."""

import socket
import struct
from typing import Any

import zmq

IDLE_S, INTERVAL_S, PROBES = 5, 2, 3
"""After `IDLE_S` seconds without a byte the system asks, `PROBES` times, each `INTERVAL_S` seconds apart. Then
it ends the connection."""


def keep_alive(control: "zmq.Socket[Any]") -> None:
    """Turn on the kernel's probes for every connection that this socket will have."""
    control.setsockopt(zmq.TCP_KEEPALIVE, 1)
    control.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    control.setsockopt(zmq.TCP_KEEPALIVE_INTVL, INTERVAL_S)
    control.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)


UNANSWERED = (
    "the other machine acknowledges nothing: the path to it is gone, or forgotten on the way"
)
_ESTABLISHED = 1
_INFO = struct.Struct("=8BI")
"""The first fields of Linux' `struct tcp_info`: the state, the consecutive retransmissions that nothing has
answered, and the time until the next (microseconds)."""
_LEAST_ROUNDS = 2
_LEAST_NEXT_S = 0.5
"""The wait for the next retransmission doubles with each. At least this long means that about as much time has
passed already, however short round trips are."""


def is_unanswered(connection: socket.socket) -> bool:
    """Whether data was retransmitted several times and the other machine's system acknowledges nothing: a
    middlebox has forgotten the connection, or the path or that machine is gone.

    The times between retransmissions follow from the round trips that the system has measured on this
    connection: in a local network this is true 0.6 s after the first packet that was lost. It is the
    system that acknowledges. A peer that is busy, stopped, or does not read is therefore not
    unanswering. Raises OSError.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    state, _, rounds, *_, next_us = _INFO.unpack(info)
    again = rounds >= _LEAST_ROUNDS and next_us >= 1e6 * _LEAST_NEXT_S
    return bool(again and state == _ESTABLISHED)
