# SPDX-License-Identifier: Apache-2.0
"""vLLM frees pages that a sliding window has passed and tells nobody: what is on offer is still the request's own,
after every step of vLLM's own scheduler."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import OFFER, PAGE, SteppedEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from pd_connector.agent.commands import Revoke
from pd_connector.kv.geometry import pages_for
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.vllm.handoff.streaming import Streaming
from pd_connector.vllm.pages.windows import Windows

FULL = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens
    )


def stolen(engine: SteppedEngine, windows: Windows, tokens: int, steps: int) -> list[int]:
    """Steps after which a page is on offer, and may be wanted, that is not the request's own any
    more."""
    engine.add("p", tokens, 200, **OFFER, transfer_id="t")
    wanted = windows.first_wanted(tokens)
    found, offer = [], None
    for step in range(steps):
        for command in engine.step():
            if isinstance(command, Revoke):
                offer = None
            elif isinstance(command, Offer):
                offer = command
        if offer is None:
            continue
        assert not offer.final
        for first, own, offered in zip(wanted, engine.pages("p"), offer.pages, strict=True):
            pairs = list(zip(own, offered, strict=False))[first : pages_for(tokens, PAGE)]
            if any(theirs not in (-1, mine) for mine, theirs in pairs):
                found.append(step)
    return found


SPECS: dict[str, Sequence[object]] = {
    "one window": [window(64)],
    "a window and everything": [FULL, window(48)],
    "less than a page": [window(10)],
}


@pytest.mark.parametrize("specs", list(SPECS.values()), ids=list(SPECS))
@pytest.mark.parametrize("tokens", [90, 96, 97, 100, 111])
@pytest.mark.parametrize("budget", [40, 512])
def test_a_prompt_that_decodes_on_does_not_offer_what_vllm_has_freed(
    specs: Sequence[object], tokens: int, budget: int
) -> None:
    engine = SteppedEngine(specs=specs, budget=budget)
    assert stolen(engine, Windows.of(specs), tokens, 80) == []


def test_without_taking_back_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harm, with the guard off."""
    monkeypatch.setattr(Streaming, "_take_back", lambda *_: [])
    specs = [window(64)]
    engine = SteppedEngine(specs=specs)
    assert stolen(engine, Windows.of(specs), 100, 80)


def test_what_is_still_there_stays_on_offer() -> None:
    """An offer is sent again only when a page has gone."""
    engine = SteppedEngine(specs=[FULL, window(64)])
    engine.add("p", 100, 200, **OFFER, transfer_id="t")
    for _ in range(2):
        engine.step()
    engine.commands.clear()
    for _ in range(100):
        engine.step()
    revokes = [command for command in engine.commands if isinstance(command, Revoke)]
    offers = [command for command in engine.commands if isinstance(command, Offer)]
    # Wanted are pages 2 to 6; the window has passed all of them at the end.
    assert len(revokes) == len(offers) == 5
    assert [sum(page < 0 for page in offer.pages[1][:7]) for offer in offers] == [3, 4, 5, 6, 7]
    assert all(min(offer.pages[0]) > 0 for offer in offers)


def test_a_window_is_known_by_its_spec() -> None:
    together = UniformTypeKVCacheSpecs(block_size=PAGE, kv_cache_specs={"a": window(64)})
    assert Windows.of([FULL, window(64), together]).tables == ((PAGE, 0), (PAGE, 64), (PAGE, 64))
