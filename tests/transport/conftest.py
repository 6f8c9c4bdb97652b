# SPDX-License-Identifier: Apache-2.0
"""Ends of every kind of transport, closed after each test."""

from collections.abc import Callable, Iterator

import pytest
from support.children import nursery
from transport_ends import End
from transport_kinds import KINDS
from transport_peer import Peer

__all__ = ["nursery"]


@pytest.fixture(params=KINDS)
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
def make_peer(kind: str, nursery: None) -> Iterator[Callable[[str], Peer]]:
    """Makes an end of this kind in another process; takes its role."""
    made: list[Peer] = []

    def make(role: str) -> Peer:
        made.append(Peer(role, kind))
        return made[-1]

    yield make
    for peer in made:
        peer.close()
