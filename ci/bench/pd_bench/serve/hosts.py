# SPDX-License-Identifier: Apache-2.0
"""`bench serve --far`: two hosts that share their KV pools through a store between them, under faults.

    host a: two unlike engines, carrier [ namespace ] === 1 Gbit/s === [ namespace ] host b: two unlike engines, carrier
    Redis, or Mooncake's master and a node; our router in front of all four engines

1. A trace is served. In its middle third the store's server is killed, and it returns before the last third.
2. Carriers are killed and started again: they put what their hosts have.
3. Each engine of host a computes prompts of its own. Host a dies with its memory. Each engine of host b is asked for these prompts until
   it has loaded one of each engine of host a from the store, or all are used up: it compares the first one (audit), looks into the
   store again, and learns how fast that is.
4. The same requests come again: host b loads what host a has computed.
5. One engine computes all requests again, without cache and pool. All answers must be equal.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_bench.command_output import printing
from pd_bench.harness import VLLM, require, wait_for
from pd_bench.netns import Bed, Namespace, available
from pd_bench.report import BenchError
from pd_bench.serve.stack import POOL_REPORTS
from pd_bench.serve.trace import TimedRequest, longest, read, timed
from pd_connector.config import KEY_VARIABLE
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.carrier.messages import Status
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import (
    Client,
    Family,
    HttpError,
    RouterProcess,
    VllmEngine,
    stop_services,
    terminate_as_interrupt,
    wait_all,
)
from pd_connector.tools.launch.service import log_folder

REDIS, MOONCAKE = "redis", "mooncake"
SCALE = 16.0
"""Divisor of the trace's lengths. A token of the byte model has 8 KiB of KV in float32."""
PAGES = ((32, 64), (128, 32))
"""Page sizes of the engines of both hosts."""
MOST_TOKENS = 8192
"""Context of the byte model."""
AT_ONCE = 4
MOST_ANSWER = 16
_MEMORY = "1GiB"
_IN_USE_S = 240.0
_PATIENCE_S = 120.0
_PROMPTS, _PROMPT_TOKENS = 6, 2000
"""Prompts of each engine of the first host for each of the other one, and their tokens at most. If prompts are short, an
engine learns that computing is faster than loading."""
_FAULT_S = 1.0
"""How long after a third has begun its fault comes, in seconds."""


@dataclass(frozen=True)
class HostsFindings:
    """What was counted.

    Attributes:
        sent, lost: requests of both turns, and those without an answer.
        unequal: answers that differ from what one engine computes alone.
        failures: of the lost ones, by text.
        first, again: chunks loaded, and those of them from the far store, in each turn.
        named: decisions of the router that named the far store.
        not_worth: chunks of the second turn that were found and computed, because that is faster by the engine's measurements.
        carriers: their counts since they were started again, up to the first host's death and the second turn's end.
    """

    sent: int
    lost: int
    unequal: int
    failures: Mapping[str, int]
    first: tuple[float, float]
    again: tuple[float, float]
    named: float
    not_worth: float
    carriers: Sequence[Mapping[str, int]]

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost or wrong, and chunks came from the other host."""
        return not self.lost and not self.unequal and self.again[1] > 0


class Server:
    """The store between the hosts, in the first one's namespace, with what hosts lend to it.

    Args:
        lends: hosts with a node of Mooncake; all, unless they are named.
        lent: bytes of each node.
    """

    def __init__(
        self,
        kind: str,
        sides: Sequence[Namespace],
        logs: Path,
        lends: Sequence[Namespace] | None = None,
        lent: int = 1 << 30,
    ) -> None:
        self._kind, self._sides, self._logs = kind, sides, logs
        self._lends, self._lent = sides if lends is None else lends, lent
        self.port, self._admin = sides[0].port(), sides[0].port()
        self._families: dict[str, Family] = {}

    def address(self, side: Namespace) -> str:
        """What the carrier of a host dials."""
        server = f"{self._sides[0].address}:{self.port}"
        if self._kind == REDIS:
            return f"redis://{server}"
        return f"mooncake://{server}?protocol=tcp&host={side.address}"

    def start(self) -> None:
        """Start it, empty."""
        if self._kind == REDIS:
            bind = ["--bind", self._sides[0].address, "--port", str(self.port)]
            room = ["--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
            keeps = ["--save", "", "--protected-mode", "no"]
            self._run("redis", self._sides[0], ["redis-server", *bind, *room, *keeps])
            return
        ports = ["--port", str(self.port), "--metrics_port", str(self._admin)]
        self._run("master", self._sides[0], [sys.executable, "-m", "mooncake.cli", *ports])
        for name, side in zip("ab", self._sides, strict=True):
            if side not in self._lends:
                continue
            lends = [side.address, f"{self._sides[0].address}:{self.port}", str(self._lent)]
            self._run(f"node-{name}", side, [sys.executable, "-c", _LENDER, *lends])

    def kill(self) -> None:
        """End it at once, with all that it has."""
        for family in self._families.values():
            family.kill()
        self._families.clear()

    def family(self, name: str) -> Family:
        """The process `redis`, `master`, `node-a` or `node-b`."""
        return self._families[name]

    def metric(self, name: str) -> float:
        """A metric of Mooncake's master; 0 if it does not tell."""
        with contextlib.suppress(HttpError):
            return Client(f"http://{self._sides[0].management}:{self._admin}").metrics().total(name)
        return 0.0

    def _run(self, name: str, side: Namespace, command: Sequence[str]) -> None:
        log = self._logs / f"{name}.log"
        self._families[name] = Family([*side.prefix, *command], log=log)


_LENDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
own, master, lent = sys.argv[1:]
while True:
    store = MooncakeDistributedStore()
    if store.setup(own, "P2PHANDSHAKE", int(lent), 64 << 20, "tcp", "", master) == 0:
        break
    time.sleep(0.5)
while True:
    time.sleep(60)
"""
"""Lends memory of its host to Mooncake, until it is killed."""


@dataclass
class BenchHost:
    """A host: its folder in memory, two engines, and a carrier."""

    name: str
    side: Namespace
    shm: Path
    engines: Sequence[VllmEngine]
    carry: Sequence[str]
    far: str
    log: Path
    carrier: Family | None = None

    def start_carrier(self) -> None:
        """Start the carrier, or start it again."""
        env = {SHM_VARIABLE: str(self.shm), "PD_CONNECTOR_FAR": self.far}
        self.carrier = Family([*self.side.prefix, *self.carry], env=env, log=self.log)

    def kill_carrier(self) -> None:
        """End the carrier at once."""
        if self.carrier is not None:
            self.carrier.kill()
            self.carrier = None

    def die(self) -> None:
        """End all that runs here at once, and lose the memory."""
        for engine in self.engines:
            engine.kill()
        self.kill_carrier()
        shutil.rmtree(self.shm, ignore_errors=True)

    def status(self) -> Status | None:
        """How its carrier is."""
        link = CarrierLink(memory_folder({SHM_VARIABLE: str(self.shm)}))
        try:
            return link.status()
        finally:
            link.close()

    def has_put_all(self) -> bool:
        """Whether its carrier knows that the far store has every chunk of this host."""
        folder = memory_folder({SHM_VARIABLE: str(self.shm)})
        there: dict[bytes, bool] = {}
        link = CarrierLink(folder)
        try:
            after, more = 0, True
            while more:
                page = link.far_page(after)
                if page is None or not page.far:
                    return False
                if page.whole:
                    there.clear()
                there.update(page.events)
                after, more = page.next, page.more
        finally:
            link.close()
        store = LocalStore(Space(folder, 0), visits=True)
        try:
            keys = store.keys()
        finally:
            store.close()
        return bool(keys) and all(there.get(key, False) for key in keys)

    def chunks(self) -> tuple[float, float]:
        """Chunks that its engines have loaded, and those of them from the far store."""
        metrics = [engine.metrics() for engine in self.engines if engine.running]
        names = ("pd_connector:pool_hits_total", "pd_connector:pool_far_hits_total")
        loaded, far = (sum(each.total(name) for each in metrics) for name in names)
        return loaded, far

    def not_worth(self) -> float:
        """Chunks that its engines have found and computed, because that was faster."""
        metrics = [engine.metrics() for engine in self.engines if engine.running]
        name = "pd_connector:pool_misses_total"
        return sum(each.total(name, cause="not_worth") for each in metrics)


@dataclass(frozen=True)
class HostsBench:
    """One run.

    Args:
        trace: file in Mooncake's form.
        far: `redis` or `mooncake`.
        requests: of a turn.
        scale: divisor of the trace's lengths.
        link_mbit: rate of the link between the hosts.
    """

    trace: Path
    far: str
    requests: int
    scale: float
    link_mbit: float

    def run(self, console: Console) -> HostsFindings:
        """Serve both turns. At the end no process, namespace or chunk is left, whatever happens.

        Raises:
            PDConnectorError: it could not be run.
        """
        lines = read(self.trace, self.requests)
        requests = [
            TimedRequest(each.at_s, each.prompt, min(each.max_tokens, MOST_ANSWER))
            for each in timed(lines, 1.0, self.scale, seed=1)
        ]
        self._check()
        if (most := longest(lines, self.scale)) > MOST_TOKENS:
            raise BenchError(
                f"--scale {self.scale:g}: the longest request has {most} tokens and the model takes {MOST_TOKENS}; ask for a larger "
                "--scale, or fewer --requests"
            )
        logs = log_folder()
        console.print(f"logs in {logs}", highlight=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(terminate_as_interrupt())
            sides = stack.enter_context(Bed(self.link_mbit)).namespaces
            secret = secrets.token_hex(32)
            key = key_file(logs)
            server = Server(self.far, sides, logs)
            stack.callback(server.kill)
            server.start()
            hosts = [
                stack.enter_context(
                    _host(place, side, server, most, key, {KEY_VARIABLE: secret}, logs)
                )
                for place, side in enumerate(sides)
            ]
            engines = [engine for host in hosts for engine in host.engines]
            urls = [engine.base_url for engine in engines]  # each serves both sides
            router = RouterProcess(urls, urls, log_path=logs / "router.log")
            stack.callback(stop_services, [*engines, router])
            for engine in engines:
                engine.start()
            wait_all(engines, console=console)
            for host in hosts:
                host.start_carrier()
            router.start()
            wait_all([router], console=console)

            return _Run(hosts, router, server, requests, printing(console)).run()

    def _check(self) -> None:
        require(VLLM, ("aiohttp", "our router needs it: pip install 'pd-connector[router]'"))
        need_store(self.far)
        need_namespaces("--far")


def counted(carrier: Status | None, *names: str) -> int | None:
    """A sum of counts of a carrier; None if it does not answer."""
    return sum(carrier.counts.get(name, 0) for name in names) if carrier else None


def need_store(kind: str) -> None:
    """Raises BenchError that names what a store of this kind needs and this machine lacks."""
    if kind == MOONCAKE:
        require(
            ("mooncake", "pip install mooncake-transfer-engine-non-cuda, and install libibverbs1")
        )
        return
    require(("redis", "pip install 'pd-connector[redis]'"))
    if not shutil.which("redis-server"):
        raise BenchError("no redis-server here: install it (Debian: apt install redis-server)")


def need_namespaces(option: str) -> None:
    """Raises BenchError if this option's network namespaces cannot be made here."""
    if reason := available():
        raise BenchError(
            f"no network namespaces here ({reason}): run {option} as root with iproute2 installed"
        )


def key_file(folder: Path) -> Path:
    """A new key of all hosts."""
    key = folder / "pool.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32) + "\n")
    return key


def carrier_command(key: Path) -> list[str]:
    """The carrier of a host. Its far store is in the environment."""
    return [sys.executable, "-m", "pd_connector", "pool", "carry", "--key-file", str(key)]


@contextlib.contextmanager
def _host(
    place: int,
    side: Namespace,
    server: Server,
    most: int,
    key: Path,
    env: Mapping[str, str],
    logs: Path,
) -> Iterator[BenchHost]:
    name = "ab"[place]
    shm = Path(tempfile.mkdtemp(prefix="pd-bench-", dir=memory_folder().parents[1]))
    env = {SHM_VARIABLE: str(shm), **env}
    engines = [
        VllmEngine(
            MODEL_DIR,
            "kv_both",
            "PDConnector",
            # Shared memory would bypass the link, and a codec would round what is compared.
            {"transports": ["tcp"], "codec": "raw", "pool": {"memory": _MEMORY}},
            name=f"{name}{number}",
            max_model_len=-(-most // page) * page,
            args=["--dtype", "float32", "--block-size", str(page), *POOL_REPORTS],
            env=env,
            log_path=logs / f"{name}{number}.log",
            namespace=side,
        )
        for number, page in enumerate(PAGES[place])
    ]
    log = logs / f"carrier-{name}.log"
    carry = [*carrier_command(key), "--answers-within", "1"]
    host = BenchHost(name, side, shm, engines, carry, server.address(side), log)
    try:
        yield host
    finally:
        host.kill_carrier()
        shutil.rmtree(shm, ignore_errors=True)


class _Run:
    """The turns, with engines that are ready."""

    def __init__(
        self,
        hosts: Sequence[BenchHost],
        router: RouterProcess,
        server: Server,
        requests: Sequence[TimedRequest],
        say: Any,
    ) -> None:
        self._hosts, self._router, self._server = hosts, router, server
        self._requests, self._say = requests, say
        self._model = hosts[0].engines[0].client.model()
        self._failures: Counter[str] = Counter()

    def run(self) -> HostsFindings:
        self._wait(self._all_known, "the router does not know what all four engines reach")
        first_texts = self._turn(self._first_parts())
        first = self._chunks(self._hosts)
        self._say(f"served {len(first_texts)}; the store's server was killed and has returned")
        for host in self._hosts:
            host.kill_carrier()
            host.start_carrier()
        self._wait(self._all_put, "the carriers have not put what their hosts have")
        lost_host, left = self._hosts
        prompts = self._compute(lost_host, _PROMPTS * len(left.engines))
        self._wait(self._all_put, "the carriers have not put what their hosts have")
        counts_of_lost = self._counts(lost_host)
        lost_host.die()
        for engine in left.engines:
            for writer, computed in prompts.items():
                given = [computed.pop() for _ in range(_PROMPTS)]
                self._wait(
                    partial(self._loads_far, left, engine, given),
                    f"{engine.name} does not load from the far store what {writer} has computed",
                )
        before, not_worth = self._chunks([left]), left.not_worth()
        self._say(f"host {lost_host.name} has died, with its memory; the same requests again")
        named = self._named()
        again_texts = self._turn([(self._requests, None)])
        after = self._chunks([left])
        named, not_worth = self._named() - named, left.not_worth() - not_worth
        carriers = (counts_of_lost, self._counts(left))
        self._say("one engine computes all of it alone")
        alone = self._alone(left.engines[0].client)
        pairs = [*zip(first_texts, alone, strict=True), *zip(again_texts, alone, strict=True)]
        lost = sum(text is None for text, _ in pairs)
        unequal = sum(text is not None and text != target for text, target in pairs)
        again = (after[0] - before[0], after[1] - before[1])
        return HostsFindings(
            len(pairs), lost, unequal, self._failures, first, again, named, not_worth, carriers
        )

    def _counts(self, host: BenchHost) -> Mapping[str, int]:
        status = host.status()
        return status.counts if status else {}

    def _compute(self, host: BenchHost, prompts: int) -> dict[str, list[TimedRequest]]:
        """Have each engine of a host compute prompts that nobody else asks for."""
        computed: dict[str, list[TimedRequest]] = {}
        nbytes = min(_PROMPT_TOKENS, max(len(each.prompt) for each in self._requests)) // 2
        for engine in host.engines:
            requests = [TimedRequest(0.0, secrets.token_hex(nbytes), 2) for _ in range(prompts)]
            for request in requests:
                self._ask(engine.client, request)
            computed[engine.name] = requests
        return computed

    def _loads_far(
        self, host: BenchHost, engine: VllmEngine, prompts: list[TimedRequest]
    ) -> bool | None:
        """Whether an engine loads a prompt from the far store, or has none left. Takes the next one of `prompts` if the
        engine looks there."""
        if not prompts:
            self._say(f"{engine.name} has computed what the far store has: it found that faster")
            return True
        if not self._looks_far(host, engine):
            return None
        before = self._chunks([host])[1]
        self._ask(engine.client, prompts.pop())
        self._ask(engine.client, TimedRequest(0.0, "x", 2))  # steps update the metrics
        return True if self._chunks([host])[1] > before else None

    def _looks_far(self, host: BenchHost, engine: VllmEngine) -> bool | None:
        """Whether an engine looks for prompts in the far store. After a fault it leaves the store alone for 5 to 30 s, and
        makes one look-up in that time: of two prompts in a row it looks for one at most.
        """
        extra = {"kv_transfer_params": {"pool": {"write": False}}}
        for _ in range(2):
            before = self._look_ups(host)
            prompt = TimedRequest(0.0, secrets.token_hex(128), 2)  # a prompt of two chunks
            if self._ask(engine.client, prompt, **extra) is None:
                return None
            if before is None or (self._look_ups(host) or 0) <= before:
                return None
        return True

    def _look_ups(self, host: BenchHost) -> int | None:
        """How many look-ups its carrier has answered."""
        return counted(host.status(), "finds_found", "finds_none")

    def _first_parts(self) -> list[tuple[Sequence[TimedRequest], Any]]:
        third = -(-len(self._requests) // 3)
        parts = [self._requests[at : at + third] for at in range(0, len(self._requests), third)]
        faults = [None, self._server.kill, self._server.start]
        return list(zip(parts, faults, strict=False))

    def _turn(self, parts: Sequence[tuple[Sequence[TimedRequest], Any]]) -> list[str | None]:
        texts: list[str | None] = []
        for requests, fault in parts:
            timer = threading.Timer(_FAULT_S, fault) if fault else None
            if timer:
                timer.start()
            with ThreadPoolExecutor(AT_ONCE) as threads:
                texts += threads.map(
                    lambda request: self._ask(self._router.client, request), requests
                )
            if timer:
                timer.join()
        return texts

    def _alone(self, client: Client) -> list[str | None]:
        """What one engine computes: with a salt of its own, it finds nothing in caches and pools."""
        extra = {
            "cache_salt": secrets.token_hex(8),
            "kv_transfer_params": {"pool": {"read": False, "write": False}},
        }
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(
                threads.map(lambda request: self._ask(client, request, **extra), self._requests)
            )

    def _ask(self, client: Client, request: TimedRequest, **extra: Any) -> str | None:
        """The answer's text; None if it was lost."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **extra,
        }
        try:
            answer = client.post("/v1/completions", body, timeout_s=_PATIENCE_S)
            return str(answer["choices"][0]["text"])
        except (HttpError, OSError, ValueError, KeyError, IndexError) as error:
            self._failures[str(error)[:200]] += 1
            return None

    def _chunks(self, hosts: Sequence[BenchHost]) -> tuple[float, float]:
        counted = [host.chunks() for host in hosts]
        return sum(loaded for loaded, _ in counted), sum(far for _, far in counted)

    def _named(self) -> float:
        samples = self._router.metrics()
        return sum(
            value
            for (name, labels), value in samples.items()
            if name == "pd_router:pool_requests_total" and dict(labels)["pool"].startswith("far ")
        )

    def _all_known(self) -> bool | None:
        try:
            state = json.loads(self._router.client.get("/health", timeout_s=10.0))
        except (HttpError, OSError):
            return None
        reach = [engine.get("cache", {}).get("far") for engine in state["engines"]]
        alike = all(reach) and len(set(reach)) == 1
        return True if alike and all(e["state"] == "up" for e in state["engines"]) else None

    def _all_put(self) -> bool | None:
        return True if all(host.has_put_all() for host in self._hosts) else None

    def _wait(self, look: Any, problem: str) -> None:
        where = self._router.log_path.parent
        wait_for(look, _IN_USE_S, lambda: f"{problem} after {_IN_USE_S:g} s; see {where}", 0.5)
