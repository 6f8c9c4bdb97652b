# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`, which any client of an engine or a router can write."""

import contextlib

import msgspec

from fuzz.script import Kind, Step
from pd_connector.config import Config
from pd_connector.control.seal import UntrustedAddressError, trusted_peers
from pd_connector.protocol.wire.params import parse, parse_address


class ParamsTarget:
    """Parses, and asks whether the address may be dialled."""

    kinds = frozenset((Kind.PARAMS,))

    def __init__(self, key: str) -> None:
        self._config = Config(key=key)

    def begin(self) -> None:
        return

    def step(self, step: Step) -> None:
        """Raises whatever nobody should raise."""
        try:
            found = msgspec.msgpack.decode(step.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        parse_address(found)
        if not isinstance(found, dict):
            return
        with contextlib.suppress(ValueError, UntrustedAddressError):
            params = parse(found)
            if params is not None and params.do_remote_prefill and params.remote_host:
                trusted_peers(params, self._config)

    def finish(self) -> None:
        return

    def close(self) -> None:
        return
