# SPDX-License-Identifier: Apache-2.0
"""A prefill engine, a decode engine and the router under load, with faults, every answer compared. Both engines use one KV
pool, whose files are harmed as well.

The reference is the answer of the prefill engine alone, before any fault. In float32 an engine gives the same greedy
tokens with computed and with received KV. A request that fails or gets other tokens breaks a promise, under any fault,
because clients here never retry.
"""

import itertools
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from chaos.ledger import Ledger
from chaos.pool_files import KINDS, harm
from pd_bench.report import BenchError
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import (
    Census,
    Client,
    HttpError,
    RouterProcess,
    Service,
    VllmEngine,
    stop_services,
    wait_all,
)
from pd_connector.tools.launch.service import log_folder

PROMPTS = 24
CLIENTS = 3
QUIET_S = 60.0
"""After the load has ended, everything must be free within this time."""
CONFIG = {
    "transports": ["tcp"],
    "audit": "off",  # every answer is compared here, and restarted engines would be audited again
    "lease_s": 6,
    "heartbeat_s": 0.5,
    "session_timeout_s": 3,
    "stall_timeout_s": 6,
    "connect_timeout_s": 4,
    "wait_timeout_s": 60,
    "pool": {"memory": "64MiB"},
}
DECODED_TOKENS = 8
REQUEST_S = 120.0
"""A request without an answer after this time is lost. The longest fault is a restart of the prefill engine."""
BURST = 4
"""Number of long prompts at once, which cause preemption of prefills."""
_models: dict[str, str] = {}  # by the URL of their client
_COMMON_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
_FEW_PAGES = (
    *("--num-gpu-blocks-override", "80", "--no-scheduler-reserve-full-isl"),
    *("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "64"),
)
"""KV blocks of the prefill engine. Four long prompts run side by side, but fewer than two fit. So they are preempted
while their KV is streamed."""
_PREEMPTIONS = "vllm:num_preemptions_total"
_GAUGES = (
    "leased_pages",
    "incoming_transfers",
    "outgoing_transfers",
    "landing_slots",
    "send_slots",
)


class EngineFault(StrEnum):
    """The faults of engines under load."""

    PREEMPT = "prefills preempted"
    STOP_PREFILL = "prefill SIGSTOP"
    STOP_DECODE = "decode SIGSTOP"
    LEAVE = "clients leave"
    KILL_PREFILL = "prefill SIGKILL"
    HARM = "pool files harmed"


class EnginesBench:
    """Faults in random order. No kind comes again before all kinds have come.

    Args:
        faults: kinds.
        seconds: duration of the load with faults, without the engines' start.
        seed: seed of the random choices.
    """

    def __init__(self, faults: Sequence[EngineFault], seconds: float, seed: int) -> None:
        self._faults = faults
        self._seconds = seconds
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._expected: dict[str, str] = {}
        self._current = "none"
        self._ledgers: dict[str, Ledger] = {}
        self._pool = Path()

    def run(self, say: Callable[[str], None]) -> list[Ledger]:
        """A ledger for each fault. The ledger `none` has requests that no fault was near.

        Raises:
            StartError: an engine does not start.
        """
        logs = log_folder()
        say(f"logs in {logs}")
        shm = Path(tempfile.mkdtemp(prefix="pd-chaos-", dir=memory_folder().parents[1]))
        self._pool = memory_folder({SHM_VARIABLE: str(shm)})
        roles = (("prefill", "kv_producer", _FEW_PAGES), ("decode", "kv_consumer", ()))
        prefill, decode = (
            VllmEngine(
                MODEL_DIR,
                role,  # type: ignore[arg-type]
                extra_config=CONFIG,
                name=name,
                args=[*_COMMON_ARGS, *args],
                env={SHM_VARIABLE: str(shm)},
                log_path=logs / f"{name}.log",
            )
            for name, role, args in roles
        )
        router = RouterProcess([prefill.base_url], [decode.base_url], log_path=logs / "router.log")
        services: list[Service] = [prefill, decode, router]
        try:
            for service in services:
                service.start()
            wait_all(services)
            self._ask_references(prefill)
            self._under_load(prefill, decode, router, say)
        finally:
            self._over.set()
            stop_services(services)
            shutil.rmtree(shm, ignore_errors=True)
        return list(self._ledgers.values())

    def _under_load(
        self,
        prefill: VllmEngine,
        decode: VllmEngine,
        router: RouterProcess,
        say: Callable[[str], None],
    ) -> None:
        for prompt in itertools.islice(self._expected, 2):  # the first session is not growth
            _answer(router.client, prompt)
        census = {one.name: Census.of(one.family) for one in (prefill, decode) if one.family}
        moved = decode.metrics()
        threads = [
            threading.Thread(target=self._ask, args=(router.client, number), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        inject: dict[EngineFault, Callable[[], int]] = {
            EngineFault.PREEMPT: lambda: self._preempt(prefill, router.client),
            EngineFault.STOP_PREFILL: lambda: self._stop(prefill),
            EngineFault.STOP_DECODE: lambda: self._stop(decode),
            EngineFault.LEAVE: lambda: self._leave(router.client),
            EngineFault.KILL_PREFILL: lambda: self._kill(prefill),
            EngineFault.HARM: self._harm,
        }
        left: list[EngineFault] = []
        loaded = 0.0
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            left = left or self._random.sample(self._faults, len(self._faults))
            fault = left.pop()
            with self._during(fault):
                loaded += self._loaded(prefill) if fault is EngineFault.KILL_PREFILL else 0
                say(f"{fault}, {max(0.0, end - time.monotonic()):.0f} s left")
                self._ledger(fault).injected += inject[fault]()
                time.sleep(2.0)  # requests that the fault may have hit end
            time.sleep(self._random.uniform(0.5, 4.0))
        self._over.set()
        for thread in threads:
            thread.join(REQUEST_S)
        grown = decode.metrics().since(moved)
        last = self._ledger("none")
        last.held = self._held(prefill, decode)
        for key, value in grown.items():
            name, labels = key
            if name == "pd_connector:failed_transfers_total" and value > 0:
                last.recomputed[dict(labels).get("cause", "")] += round(value)
        received = grown.total("pd_connector:received_transfers_total")
        if not received:
            raise BenchError("no transfer has arrived: nothing was tested")
        loaded += self._loaded(prefill, decode)
        if not loaded:
            raise BenchError("no chunk of the pool was loaded: nothing was tested")
        decode_now = Census.of(decode.family) if decode.family else census["decode"]
        was = census["decode"]
        last.growth = decode_now.files - was.files, decode_now.threads - was.threads, 0
        last.note = f"{received:.0f} transfers arrived, {loaded:.0f} chunks were loaded; growth is the decode engine's"

    def _ask_references(self, engine: VllmEngine) -> None:
        text = "Nobody knew what the seven quiet machines were counting, or why they had begun. "
        for number in range(PROMPTS):
            size = self._random.randrange(40, 1500)
            prompt = f"{number}: " + "".join(self._random.choices(text, k=size))
            self._expected[prompt] = _answer(engine.client, prompt)

    def _ask(self, client: Client, number: int) -> None:
        """One client: asks, compares, asks again."""
        choices = random.Random(number)
        prompts = list(self._expected)
        while not self._over.is_set():
            prompt = choices.choice(prompts)
            with self._lock:
                before = self._current
            self._compare(client, prompt, before)

    def _compare(self, client: Client, prompt: str, fault: str) -> None:
        """Ask once, and count the answer for this fault, or for the fault that came during the request."""
        try:
            right = _answer(client, prompt) == self._expected[prompt]
            problem = ""
        except (HttpError, OSError) as error:
            right, problem = False, repr(error)[:300]
        with self._lock:
            ledger = self._ledger(self._current if fault == "none" else fault)
            if problem:
                ledger.lost += 1
                ledger.note = problem
            else:
                ledger.count("", right)

    def _ledger(self, name: str) -> Ledger:
        return self._ledgers.setdefault(name, Ledger(name, "engines, tcp"))

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        with self._lock:
            self._current = name
        began = time.monotonic()
        yield
        with self._lock:
            self._current = "none"
            ledger = self._ledger(name)
            ledger.seconds += time.monotonic() - began

    def _preempt(self, engine: VllmEngine, client: Client) -> int:
        """Send more long prompts at once than fit into the prefill engine. Returns the number of preemptions."""
        before = engine.metrics().total(_PREEMPTIONS)
        longest = sorted(self._expected, key=len)[-BURST:]
        with ThreadPoolExecutor(BURST) as threads:
            for prompt in longest:
                threads.submit(self._compare, client, prompt, EngineFault.PREEMPT)
        return round(engine.metrics().total(_PREEMPTIONS) - before)

    def _stop(self, engine: VllmEngine) -> int:
        engine.pause()
        time.sleep(self._random.choice((0.2, 1.0, 4.0)))
        engine.resume()
        return 1

    def _kill(self, engine: VllmEngine) -> int:
        began = time.monotonic()
        engine.kill()
        engine.start()
        engine.wait_ready()
        ledger = self._ledger(EngineFault.KILL_PREFILL)
        ledger.slowest_s = max(ledger.slowest_s, time.monotonic() - began)
        return 1

    def _harm(self) -> int:
        files = sorted(self._pool.glob("*/data/*"))
        return sum(harm(files, kind, self._random) for kind in 2 * KINDS)

    @staticmethod
    def _loaded(*engines: VllmEngine) -> float:
        return sum(one.metrics().total("pd_connector:pool_hits_total") for one in engines)

    def _leave(self, client: Client) -> int:
        """Clients that hang up in the middle of their answers, or before they begin."""
        for _ in range(3):
            prompt = self._random.choice(list(self._expected))
            stream = client.stream("/v1/completions", _body(client, prompt), REQUEST_S)
            for _event in itertools.islice(stream, self._random.randrange(1, 3)):
                pass
            stream.close()  # type: ignore[attr-defined]
        return 1

    def _held(self, *engines: VllmEngine) -> int:
        deadline = time.monotonic() + QUIET_S
        while True:
            held = [
                one.metrics().total(f"pd_connector:{name}") for one in engines for name in _GAUGES
            ]
            if not any(held) or time.monotonic() > deadline:
                return round(sum(held))
            time.sleep(0.5)


def _body(client: Client, prompt: str) -> dict[str, object]:
    """A request for a few tokens of a greedy answer."""
    model = _models.setdefault(client.base_url, "") or client.model()
    _models[client.base_url] = model
    request = {"model": model, "prompt": prompt, "max_tokens": DECODED_TOKENS, "temperature": 0}
    # A prompt with the shared salt may be cached, or in the pool.
    salt = random.choice((str(random.random()), "shared"))
    return {**request, "ignore_eos": True, "cache_salt": salt}


def _answer(client: Client, prompt: str) -> str:
    """The answer to such a request. Raises HttpError, or OSError."""
    response = client.post("/v1/completions", _body(client, prompt), REQUEST_S)
    return str(response["choices"][0]["text"])
