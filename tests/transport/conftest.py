# SPDX-License-Identifier: Apache-2.0
"""Ends of every kind of transport, closed after each test."""

from collections.abc import Callable, Iterator

import pytest
from transport_ends import End
from transport_peer import Peer

try:
    from nixl import _api  # noqa: F401

    _NO_NIXL = ""
except ImportError as error:
    _NO_NIXL = str(error)

_nixl = pytest.param(
    "nixl", marks=pytest.mark.skipif(bool(_NO_NIXL), reason=f"nixl cannot be imported: {_NO_NIXL}")
)


@pytest.fixture(params=["shm", "tcp", "tcp+curve", _nixl])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_end(kind: str) -> Iterator[Callable[..., End]]:
    """Makes ends of this kind; takes what `End` takes."""
    made: list[End] = []

    def make(**options: object) -> End:
        made.append(End(kind, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for end in made:
        end.close()


@pytest.fixture
def make_peer(kind: str) -> Iterator[Callable[[str], Peer]]:
    """Makes an end of this kind in another process; takes its role."""
    made: list[Peer] = []

    def make(role: str) -> Peer:
        made.append(Peer(role, kind))
        return made[-1]

    yield make
    for peer in made:
        peer.close()
