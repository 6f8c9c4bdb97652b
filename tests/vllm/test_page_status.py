# SPDX-License-Identifier: Apache-2.0
"""May KV of this request be used? Every order of events is compared with what an onlooker would say."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pd_connector.vllm.handoff.fetching import FetchGoesFirst
from pd_connector.vllm.handoff.uncomputable import Uncomputable
from pd_connector.vllm.identity.inputs import LEAST_ELEMENTS, AmbiguousInputs, RequestIdentity
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.pages.partial import PartialPages
from pd_connector.vllm.pages.stale import StalePages
from pd_connector.vllm.pages.stale_adapter import StaleAdapterPages
from pd_connector.vllm.pages.status import PageRule, PageStatus, Use
from pd_connector.vllm.pages.unverified import UnverifiedPages
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import Part

PAGE = 16
PAGES = 12
"""Few, so that they are handed out again and again."""


class Blocks:
    """Page ids as vLLM's `KVCacheBlocks` gives them."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.pages,)


class FakeAdapters:
    """Adapters by name, each with the number of the version that is loaded."""

    def __init__(self) -> None:
        self.loaded = {"one": 0, "two": 0}

    def replaced(self, request: Any, *, look: bool = True) -> bool:
        return bool(request.adapter) and self.loaded[request.adapter] != request.adapter_version

    def unchanged(self, request: Any) -> bool:
        return not self.replaced(request)

    def finished(self, request: Any) -> None:
        pass


class Events(RuleBasedStateMachine):
    """Requests that come, get pages, load, and end, while adapters, weights and producers change."""

    waiting = Bundle("waiting")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.adapters, self.identity = FakeAdapters(), RequestIdentity()
        self.fetched: set[str] = set()
        self.stale = StalePages()
        adapters: Any = self.adapters
        unfilled = PartialPages(Windows([(PAGE, 0)]))
        uncomputable = Uncomputable(encoded_elsewhere=True)
        self.status = PageStatus(
            AmbiguousInputs(self.identity), UnverifiedPages([PAGE]), unfilled, self.stale
        )
        outdated = StaleAdapterPages(adapters, uncomputable, lambda _: None)
        self.status.add(outdated, FetchGoesFirst(self.fetched.__contains__))
        self.free = list(range(1, PAGES))
        pool = SimpleNamespace(
            get_new_blocks=self._hand_out, evict_blocks=lambda _: None, num_gpu_blocks=PAGES
        )
        self.manager: Any = SimpleNamespace(
            block_pool=pool,
            allocate_slots=lambda request, *_, **__: Blocks(request.pages),
            prefix_cache_lookup_enabled=lambda _: True,
            coordinator=SimpleNamespace(cache_blocks=lambda *_: None),
            get_block_ids=lambda _: ([],),
        )
        self.status.bind(self.manager)
        self.requests: dict[str, Any] = {}
        self.came = 0
        # What the onlooker remembers.
        self.images: dict[str, set[int]] = {}
        self.mixed: set[str] = set()
        self.foreign_pages: set[int] = set()
        self.foreign: set[str] = set()

    def _hand_out(self, count: int) -> list[Any]:
        pages = [self.free.pop(0) for _ in range(min(count, len(self.free)))]
        self.foreign_pages.difference_update(pages)
        return [SimpleNamespace(block_id=page) for page in pages]

    @rule(
        target=waiting,
        adapter=st.sampled_from(["", "one", "two"]),
        image=st.sampled_from([None, ("a", 1), ("a", 2), ("b", 1)]),
    )
    def come(self, adapter: str, image: tuple[str, int] | None) -> Any:
        self.came += 1
        features = []
        if image:
            name, content = image
            data = {"pixels": SimpleNamespace(data=torch.full((LEAST_ELEMENTS,), float(content)))}
            place = SimpleNamespace(offset=0, length=1)
            features = [
                SimpleNamespace(identifier=name, data=data, modality="image", mm_position=place)
            ]
            self.images.setdefault(name, set()).add(content)
        request = SimpleNamespace(
            request_id=f"r{self.came}",
            mm_features=features,
            lora_request=adapter or None,
            adapter=adapter,
            adapter_version=self.adapters.loaded.get(adapter, 0),
            pages=[],
            num_computed_tokens=0,
        )
        self.requests[request.request_id] = request
        self.status.queued(request)
        return request

    @rule(
        target=running,
        request=consumes(waiting),
        shares=st.integers(0, 2),
        count=st.integers(1, 3),
        loads=st.sampled_from(["", "ours", "another's"]),
        of=st.data(),
    )
    def admit(self, request: Any, shares: int, count: int, loads: str, of: Any) -> Any:
        """vLLM finds some pages of another request in its cache, and hands out others."""
        others = [one for one in self.requests.values() if one.pages]
        cached = list(of.draw(st.sampled_from(others)).pages[:shares]) if others else []
        new = [block.block_id for block in self.manager.block_pool.get_new_blocks(count)]
        request.pages = cached + new
        external = len(new) * PAGE if loads else 0
        self.manager.allocate_slots(
            request,
            num_new_computed_tokens=len(cached) * PAGE,
            new_computed_blocks=Blocks(cached) if cached else None,
            num_external_computed_tokens=external,
        )
        self.status.admitted(request, Blocks(request.pages), external if loads == "ours" else 0)
        starts = [place for place, page in enumerate(request.pages) if page in self.foreign_pages]
        if loads == "another's" and new:
            starts.append(len(cached))
        if starts:
            self.foreign.add(request.request_id)
            self.foreign_pages.update(request.pages[min(starts) :])
        return request

    @rule(request=consumes(running))
    def end(self, request: Any) -> None:
        self.status.finished(request)
        self.requests.pop(request.request_id)
        self.fetched.discard(request.request_id)
        still = {page for one in self.requests.values() for page in one.pages}
        self.free += [page for page in request.pages if page not in still and page not in self.free]

    @rule(name=st.sampled_from(["one", "two"]))
    def replace_adapter(self, name: str) -> None:
        self.adapters.loaded[name] += 1

    @rule()
    def change_weights(self) -> None:
        assert self.stale.changed({0: self.stale.changes.get(0, 0) + 1})
        self.mixed |= {name for name, one in self.requests.items() if one.pages}

    @rule(number=st.integers(1, 3))
    def distrust(self, number: int) -> None:
        before = self.stale._distrusted.get(0, 0.0)
        self.stale.distrusted({0: {"distrusted_producers": float(number)}})
        if number > before:
            self.mixed |= {name for name, one in self.requests.items() if one.pages}

    @rule(request=running)
    def fetch(self, request: Any) -> None:
        self.fetched.add(request.request_id)

    def _reasons(self, request: Any) -> Iterator[tuple[str, set[Use]]]:
        every, name = set(Use), request.request_id
        if any(len(self.images[one.identifier]) > 1 for one in request.mm_features):
            yield "ambiguous", every - {Use.LOAD}
        if name in self.foreign:
            yield "unverified", {Use.COMPARE, Use.SAVE}
        if name in self.mixed:
            yield "stale", every
        if request.adapter and self.adapters.loaded[request.adapter] != request.adapter_version:
            yield "adapter", every
        if name in self.fetched:
            yield "handoff", {Use.LOAD}

    @invariant()
    def every_answer_is_the_onlookers(self) -> None:
        for request in self.requests.values():
            for use in Use:
                causes = {cause for cause, uses in self._reasons(request) if use in uses}
                answer = self.status.problem(request, use)
                assert (answer in causes) if causes else answer == "", (use, answer, causes)


Events.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestEvents = Events.TestCase


class Control(Events):
    """Found is enough; the shortest example is not looked for."""


Control.TestCase.settings = settings(
    Events.TestCase.settings, phases=[Phase.generate], database=None
)


@pytest.mark.parametrize(
    ("owner", "hook"),
    [
        (AmbiguousInputs, "queued"),
        (UnverifiedPages, "admitted"),
        (StalePages, "admitted"),
        (StaleAdapterPages, "holds"),
    ],
)
def test_a_rule_that_does_not_hear_of_an_event_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, hook: str
) -> None:
    monkeypatch.setattr(owner, hook, lambda *_: None)
    with pytest.raises(AssertionError):
        Control.TestCase("runTest").runTest()


class Header(PageRule):
    """A rule of its own: KV of requests with a header is never saved."""

    cause = "header"
    forbids = (Use.SAVE,)

    def holds(self, request: Any) -> bool:
        return "x-private" in request.headers


def test_a_new_rule_is_a_class_and_its_place_in_the_list() -> None:
    status = PageStatus(StalePages(), Header())
    private = SimpleNamespace(request_id="a", headers={"x-private"})
    assert [status.problem(private, use) for use in Use] == ["", "", "header", ""]
    public = SimpleNamespace(request_id="b", headers=set[str]())
    assert not any(status.problem(public, use) for use in Use)


def test_hooks_of_a_part_do_nothing_by_default() -> None:
    part, step = Part(), StepCommands()
    request: Any = SimpleNamespace(request_id="a")
    assert part.matched(request, 0) == 0
    assert part.allocated(request, Blocks([]), 0) is None  # type: ignore[arg-type]
    part.step(SimpleNamespace(), step)  # type: ignore[arg-type]
    assert not step.commands
    assert part.finished(request, ()) == (False, None, ())
