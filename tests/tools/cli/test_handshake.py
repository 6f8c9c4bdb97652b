# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of keys, by the handshake that engines make, with the control port of a real agent."""

import pytest
from support.agents import SHORT, Ranks, ranks

from pd_connector.control.keys import new_key
from pd_connector.tools.cli.checks import handshake

__all__ = ["ranks"]


@pytest.mark.parametrize(
    ("theirs", "here", "found", "advice"),
    [
        ("a", "a", None, None),
        ("", "", None, None),
        ("a", "b", "does not accept the key that is set here", "the two keys differ"),
        (
            "a",
            "",
            "does not answer without a key",
            "set PD_CONNECTOR_KEY here to that engine's key",
        ),
        ("", "b", "has no key, and PD_CONNECTOR_KEY is set here", "start that engine with"),
    ],
    ids=["one key", "no key", "two keys", "none here", "none there"],
)
def test_a_wrong_key_is_found_by_the_real_handshake_and_its_side_is_told(
    ranks: Ranks, theirs: str, here: str, found: str | None, advice: str | None
) -> None:
    keys = {"a": new_key(), "b": new_key(), "": ""}
    engine = ranks({**SHORT, "transports": ("tcp",), "key": keys[theirs]}, consumes=False)
    engine.agent.introduce((engine.peer,))
    host, port, _ = engine.peer.source
    limit_s = 2.0 if theirs and not here else 60.0  # who has a key does not answer without one
    problem = handshake.greet(host, port, {"PD_CONNECTOR_KEY": keys[here]}, limit_s)
    if found is None:
        assert problem is None
    else:
        assert problem is not None
        assert found in problem[0]
        assert advice in problem[1]


def test_a_key_here_that_can_be_guessed_is_told() -> None:
    found, _ = handshake.greet("127.0.0.1", 1, {"PD_CONNECTOR_KEY": "secret"}) or ("", "")
    assert "could be guessed" in found
