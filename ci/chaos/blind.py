# SPDX-License-Identifier: Apache-2.0
"""Guards taken off, for controls: the bench must find the harm."""

from collections.abc import Iterable
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, modes

from chaos.seam import TamperingTransport
from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.agent.page_gate import PageGate
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import IncomingChunk
from pd_connector.transport.base import Transport
from pd_connector.transport.tcp import cipher
from pd_connector.transport.tcp.cipher import AeadOpener
from pd_connector.transport.tcp.sums import SumOpener

BYTES, PAGES, PATH = "bytes", "pages", "path"
"""The guard that is off: received bytes equal sent bytes, pages still belong to the request, or chunks take the same
path with and without the wrapper."""


def blind(to: str) -> None:
    """Take the guards off in this process. It cannot be trusted afterwards."""
    if to == BYTES:
        ReceivePipeline.place = _place  # type: ignore[assignment,method-assign]
        cipher.AeadOpener = _BlindAeadOpener  # type: ignore[misc]
        cipher.SumOpener = _BlindSumOpener  # type: ignore[attr-defined]
    elif to == PAGES:
        PageGate.shut = lambda gate, request, timeout_s=0.0: True  # type: ignore[assignment,method-assign]
        PageGate.open = lambda gate, request: None  # type: ignore[assignment,method-assign]
    elif to == PATH:
        TamperingTransport.prepare = Transport.prepare  # type: ignore[method-assign]
        TamperingTransport.destinations = None  # type: ignore[assignment,method-assign]


_honest_place = ReceivePipeline.place


def _place(
    receive_pipeline: ReceivePipeline, chunk: IncomingChunk, path: Any
) -> tuple[Cause | None, str]:
    cause, detail = _honest_place(receive_pipeline, chunk, path)
    return (None, "") if cause is Cause.CHECKSUM else (cause, detail)


class _BlindSumOpener(SumOpener):
    def open_parts(self, head: memoryview, sealed: memoryview, parts: Iterable[memoryview]) -> None:
        at = 0
        for part in parts:
            part[:] = sealed[at : at + len(part)]
            at += len(part)


class _BlindAeadOpener(AeadOpener):
    def open(self, head: memoryview, sealed: memoryview, out: memoryview) -> None:
        self.open_parts(head, sealed, [out])

    def open_parts(self, head: memoryview, sealed: memoryview, parts: Iterable[memoryview]) -> None:
        context = Cipher(self._key, modes.GCM(self._next())).decryptor()
        at = 0
        for part in parts:
            at += context.update_into(sealed[at : at + len(part)], part)
