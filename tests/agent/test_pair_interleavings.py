# SPDX-License-Identifier: Apache-2.0
"""Producer and consumers coupled, under every order of events that hypothesis can think of.

`support.machines.World` asserts at each step: one `Free` an offer, one `Finished` a load, no page
touched that belongs to another load, and exact bytes in every page that counts as received.
"""

import random

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.machines import (
    CONFIG,
    FALSE_FIELDS,
    HALVES,
    STAGES,
    WHOLE,
    Flight,
    Line,
    Link,
    World,
    identity_of,
)

from pd_connector.errors import Cause
from pd_connector.protocol.wire import messages

NAMES = [f"transfer{i}" for i in range(3)]
names = st.sampled_from(NAMES)
which = st.integers(0, 11)
prompts = st.sampled_from([12, 15, 4])
MESSAGES_TO_PRODUCER = ("done", "cancel", "cancels", "credit", "open", "range", "beat", "watch")
MESSAGES_TO_CONSUMER = ("accept", "complete", "refuse", "cancelled", "ready")


class Interleavings(RuleBasedStateMachine):
    """Consumers of three slots a rank, one producer, faults and lies at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(consumers=2)

    @initialize(
        ranks=st.sampled_from(
            [
                (2, (WHOLE,), (WHOLE,)),
                (1, (WHOLE,), HALVES),
                (2, HALVES, (WHOLE,)),
                (1, STAGES, HALVES),
            ]
        ),
        one_sided=st.booleans(),
    )
    def begin_with(self, ranks: tuple[int, tuple, tuple], one_sided: bool) -> None:
        consumers, sources, shards = ranks
        self.world = World(
            consumers,
            sources=sources,
            shards=shards,
            one_sided=one_sided,
            writes_late=one_sided,
        )

    def link(self, i: int) -> Link:
        return self.world.links[i % len(self.world.links)]

    def line(self, i: int) -> Line:
        return self.link(i).lines[i // 2 % len(self.link(i).lines)]

    def prefilling(self, i: int) -> str:
        """A request of the producer that has not ended, if there is one."""
        rank = self.world.ranks[i % len(self.world.ranks)]
        running = [r for r, prefill in rank.prefills.items() if not prefill.final]
        return running[i % len(running)] if running else ""

    def flight(self, i: int) -> Flight:
        return self.world.flights[i % len(self.world.flights)]

    @rule(transfer=names, tokens=prompts, announced=st.booleans(), at_once=st.booleans())
    def prefill(self, transfer: str, tokens: int, announced: bool, at_once: bool) -> None:
        if announced:
            for rank in self.world.ranks:
                rank.producer.expect(transfer, self.world.now)
        request = self.world.begin(transfer, tokens)
        if at_once:
            self.world.finish(request)

    @rule(i=which, tokens=st.integers(0, 20), stop_layer=st.sampled_from([None, 0, 1, 2]))
    def compute(self, i: int, tokens: int, stop_layer: int | None) -> None:
        self.world.compute(self.prefilling(i), tokens, stop_layer)

    @rule(i=which)
    def finish(self, i: int) -> None:
        self.world.finish(self.prefilling(i))

    @rule(i=which)
    def preempt(self, i: int) -> None:
        self.world.preempt(self.prefilling(i))

    @rule(i=which)
    def withdraw(self, i: int) -> None:
        self.world.withdraw(self.prefilling(i))

    @rule(
        i=which,
        transfer=names,
        stop=prompts,
        first=st.sampled_from([0, 0, 2, 6]),
        wait=st.booleans(),
        all_ranks=st.booleans(),
    )
    def load(
        self, i: int, transfer: str, stop: int, first: int, wait: bool, all_ranks: bool
    ) -> None:
        for link in self.world.links if all_ranks else [self.link(i)]:
            self.world.load(link, transfer, stop, first=min(first, stop - 2), wait=wait)

    @rule(i=which, transfer=names, tokens=prompts)
    def begin_a_stream(self, i: int, transfer: str, tokens: int) -> None:
        request = self.world.begin(transfer, tokens)
        self.world.compute(request, 0)
        links = self.world.links
        for link in links if len(self.world.links[0].consumer._shards) > 1 else links[i % 2 :][:1]:
            self.world.load(link, transfer, tokens, wait=True)
        self.world.talk()

    @rule(i=which, transfer=names)
    def load_from_one_rank_only(self, i: int, transfer: str) -> None:
        self.world.load(self.link(i), transfer, 5, peers=self.world.peers[:1])

    @rule(i=which, transfer=names)
    def load_other_tokens(self, i: int, transfer: str) -> None:
        self.world.load(self.link(i), transfer, 3, identity=b"other tokens")

    @rule(i=which, transfer=names, watch=st.booleans(), then_load=st.booleans())
    def hold(self, i: int, transfer: str, watch: bool, then_load: bool) -> None:
        link = self.link(i)
        request = self.world.hold(link, transfer, watch=watch)
        if then_load and not watch:
            self.world.load(link, transfer, 5, request=request)

    @rule(i=which)
    def load_what_was_watched(self, i: int) -> None:
        link = self.link(i)
        for incoming in list(link.consumer._transfers):
            held = link.held.get(incoming.request)
            if held is not None and incoming.load is None:
                wait = True
                self.world.load(link, incoming.transfer, 8, request=incoming.request, wait=wait)

    @rule(i=which, j=which)
    def drop(self, i: int, j: int) -> None:
        link = self.link(i)
        loading = [request for request, lent in link.lent.items() if not lent.arrived]
        loading += sorted(link.watching)
        if loading:
            self.world.drop(link, loading[j % len(loading)])

    @rule(i=which)
    def retire(self, i: int) -> None:
        link = self.link(i)
        for request in [r for r, lent in link.lent.items() if lent.arrived][:1]:
            self.world.retire(link, request)

    @rule(i=which, fails=st.sampled_from([False, False, False, True]))
    def connect(self, i: int, fails: bool) -> None:
        if self.line(i).dialling:
            cause = Cause.UNREACHABLE if fails else None
            self.world.connect(self.link(i), cause, self.line(i))

    @rule(i=which, count=st.integers(1, 6))
    def hear(self, i: int, count: int) -> None:
        for _ in range(count):
            self.world.hear(self.link(i), self.line(i))

    @rule(i=which, count=st.integers(1, 6))
    def listen(self, i: int, count: int) -> None:
        for _ in range(count):
            self.world.listen(self.link(i), self.line(i))

    @rule(chunks=st.integers(1, 4))
    def send(self, chunks: int) -> None:
        for _ in range(chunks):
            self.world.send()

    @rule(i=which)
    def send_as_pages_are_revoked(self, i: int) -> None:
        self.world.send(self.world.ranks[i % len(self.world.ranks)], gate_shut=True)

    @precondition(lambda self: self.world.flights)
    @rule(i=which, again=st.sampled_from([False, False, True]))
    def land(self, i: int, again: bool) -> None:
        flight = self.flight(i)
        self.world.land(flight)
        if not again:
            self.world.flights.remove(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which, field=st.sampled_from([None, *FALSE_FIELDS]))
    def land_a_lie(self, i: int, field: str | None) -> None:
        flight = self.flight(i)
        if field is None:
            flight.payload = bytes(len(flight.payload))
        else:
            flight.header = msgspec.structs.replace(flight.header, **{field: FALSE_FIELDS[field]})
        self.world.land(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which, slot=st.integers(0, 4))
    def land_in_another_slot(self, i: int, slot: int) -> None:
        flight = self.flight(i)
        flight.slot = slot
        self.world.land(flight)

    @precondition(lambda self: self.world.flights)
    @rule(i=which)
    def lose_a_chunk(self, i: int) -> None:
        self.world.flights.remove(self.flight(i))

    @precondition(lambda self: self.world.writes)
    @rule(i=which, ok=st.sampled_from([True, True, True, False]))
    def end_a_write(self, i: int, ok: bool) -> None:
        self.world.end_write(self.world.writes[i % len(self.world.writes)], ok)

    @rule(i=which, noticed=st.booleans())
    def break_session(self, i: int, noticed: bool) -> None:
        self.world.break_session(self.link(i), noticed, self.line(i))

    @rule(i=which)
    def restart_producer(self, i: int) -> None:
        self.world.restart_producer(i % len(self.world.ranks))

    @rule(i=which, to_producer=st.booleans(), twice=st.booleans())
    def garble(self, i: int, to_producer: bool, twice: bool) -> None:
        """A control message is lost, or comes twice."""
        queue = self.line(i).to_producer if to_producer else self.line(i).to_consumer
        if queue and twice:
            queue.appendleft(queue[0])
        elif queue:
            queue.popleft()

    @rule(i=which, transfer=names, lie=st.sampled_from(MESSAGES_TO_PRODUCER))
    def lie_to_producer(self, i: int, transfer: str, lie: str) -> None:
        line = self.line(i)
        identity, slot = identity_of(transfer), CONFIG.slot_bytes
        message: messages.ConsumerMessage = {
            "done": messages.Done(transfer),
            "cancel": messages.Cancel(transfer, Cause.ABORTED),
            "cancels": messages.Cancel(transfer, Cause.ABORTED, 2),
            "credit": messages.Credit(transfer, [0, 1, 2, 2**32 - 1]),
            "open": messages.Open(transfer, identity, 0, 3, True, [0, 0, 9], slot, readers=2),
            "range": messages.Open(transfer, identity, 4, 2**62, False, [], slot),
            "beat": messages.Heartbeat([*NAMES, "transfer9"]),
            "watch": messages.Watch(transfer),
        }[lie]
        if line.session is not None:
            line.to_producer.append(message)

    @rule(i=which, transfer=names, lie=st.sampled_from(MESSAGES_TO_CONSUMER))
    def lie_to_consumer(self, i: int, transfer: str, lie: str) -> None:
        line = self.line(i)
        message: messages.ProducerMessage = {
            "accept": messages.Accept(transfer, 2, False),
            "complete": messages.Accept(transfer, 2, True),
            "refuse": messages.Refuse(transfer, "no such cause", ""),
            "cancelled": messages.Cancelled(transfer),
            "ready": messages.Ready(transfer),
        }[lie]
        if line.session is not None:
            line.to_consumer.append(message)

    @rule(i=which)
    def beat(self, i: int) -> None:
        self.world.beat(self.link(i))

    @rule(seconds=st.sampled_from([0.5, 4.0, 4.0, 11.0, 40.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def talk(self) -> None:
        self.world.talk()

    @rule()
    def run_fairly(self) -> None:
        self.world.run()

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        self.world.check_integrity()
        for rank in self.world.ranks:
            left = [prefill for prefill in rank.prefills.values() if prefill.final]
            assert rank.producer.leased_pages == sum(len(prefill.pages) for prefill in left)

    def teardown(self) -> None:
        self.world.settle()


_settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = _settings


@given(seed=st.integers(0, 2**32), shape=st.integers(0, 3), one_sided=st.booleans())
@settings(max_examples=150, deadline=None)
def test_long_walks_with_a_fault_now_and_then(seed: int, shape: int, one_sided: bool):
    """The machine above tries odd orders; here streams come far before something happens."""
    chance = random.Random(seed)
    sources, shards = [
        ((WHOLE,), (WHOLE,)),
        ((WHOLE,), HALVES),
        (HALVES, (WHOLE,)),
        (STAGES, HALVES),
    ][shape]
    world = World(
        3 - len(shards),
        sources=sources,
        shards=shards,
        one_sided=one_sided,
        writes_late=one_sided,
    )
    steps = chance.choice([200, 2000])
    for _ in range(steps):
        kind = chance.choices([begin, go_on, move, fault], [3, 15, 150, 1])[0]
        kind(chance, world, len(shards))
        world.check_integrity()
    world.settle()


def running(chance: random.Random, world: World) -> str:
    prefills = chance.choice(world.ranks).prefills.values()
    return chance.choice([p.request for p in prefills if not p.final] or [""])


def begin(chance: random.Random, world: World, ranks: int) -> None:
    """A prefill, with or without those that want its KV."""
    number = len(world.tags) if chance.random() < 0.8 else chance.randrange(len(world.tags) + 1)
    name, tokens = f"transfer{number}", chance.choice([3, 12, 16])
    if chance.random() < 0.8:
        for rank in world.ranks:
            rank.producer.expect(name, world.now)
    request = world.begin(name, tokens)
    if chance.random() < 0.2:
        world.finish(request)
    first = chance.randrange(len(world.links)) // ranks * ranks
    for link in world.links[first : first + ranks]:
        kind = chance.choice(["load", "load", "load", "watch", "none"])
        if kind == "load":
            world.load(link, name, tokens, wait=chance.random() < 0.8)
        elif kind == "watch":
            world.hold(link, name, watch=True)


def go_on(chance: random.Random, world: World, ranks: int) -> None:
    """An engine does what it does."""
    link = chance.choice(world.links)
    for incoming in list(link.consumer._transfers):
        if incoming.load is None and incoming.request in link.held:
            world.load(link, incoming.transfer, 12, request=incoming.request, wait=True)
    for request in [r for r, lent in link.lent.items() if lent.arrived]:
        world.retire(link, request)
    request, kind = running(chance, world), chance.random()
    if kind < 0.05:
        world.preempt(request)
    elif kind < 0.08:
        world.withdraw(request)
    elif kind < 0.3:
        world.finish(request)
    else:
        world.compute(request, chance.randint(1, 16), chance.choice([None, 0, 1, 2]))


def move(chance: random.Random, world: World, ranks: int) -> None:
    """Something arrives somewhere."""
    link = chance.choice(world.links)
    line = chance.choice(link.lines)
    kind = chance.choice(["connect", "hear", "listen", "send", "land", "end", "gate", "beat"])
    if kind == "connect" and line.dialling:
        world.connect(link, line=line)
    elif kind == "hear":
        world.hear(link, line)
    elif kind == "listen":
        world.listen(link, line)
    elif kind == "send":
        world.send(chance.choice(world.ranks))
    elif kind == "land" and world.flights:
        world.land(world.flights.pop(chance.randrange(len(world.flights))))
    elif kind == "end" and world.writes:
        world.end_write(chance.choice(world.writes))
    elif kind == "gate" and chance.random() < 0.1:
        world.send(chance.choice(world.ranks), gate_shut=True)
    elif kind == "beat" and chance.random() < 0.1:
        world.beat(link)


def fault(chance: random.Random, world: World, ranks: int) -> None:
    link = chance.choice(world.links)
    line = chance.choice(link.lines)
    flight = chance.choice(world.flights) if world.flights else None
    kind = chance.choice(["drop", "break", "restart", "time", "time", "chunk", "write", "message"])
    if kind == "drop":
        wanted = [r for r, lent in link.lent.items() if not lent.arrived] + sorted(link.watching)
        for request in wanted[:1]:
            world.drop(link, request)
    elif kind == "break":
        world.break_session(link, chance.random() < 0.5, line)
    elif kind == "restart":
        world.restart_producer(chance.randrange(len(world.ranks)))
    elif kind == "time":
        world.pass_time(chance.choice([0.5, 4.0, 11.0, 40.0, 310.0]))
    elif kind == "chunk" and flight:
        name = chance.choice([*FALSE_FIELDS, "payload", "slot", "again", "lost"])
        if name in FALSE_FIELDS:
            flight.header = msgspec.structs.replace(flight.header, **{name: FALSE_FIELDS[name]})
        elif name == "payload":
            flight.payload = bytes(len(flight.payload))
        elif name == "slot":
            flight.slot = chance.randrange(5)
        elif name == "again":
            world.land(flight)
        else:
            world.flights.remove(flight)
    elif kind == "write" and world.writes:
        world.end_write(chance.choice(world.writes), ok=False)
    elif kind == "message":
        queue = chance.choice([line.to_producer, line.to_consumer])
        if queue and chance.random() < 0.5:
            queue.append(queue[0])
        elif queue:
            queue.popleft()
