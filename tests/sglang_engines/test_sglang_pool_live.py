# SPDX-License-Identifier: Apache-2.0
"""One host's KV pool behind engines of both kinds: what one of them computed the others load, with equal log probabilities.

Faults while an engine loads and saves: one of its processes is killed or stopped, or it is stopped while files are cut, altered,
swapped and removed. No answer is wrong, none is aborted, and nothing is held. PD_POOL_FAULTS=100 in the environment sets their number.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import fresh_salt
from pools import CHUNKS
from safetensors.torch import load_file, save_file
from sglang_engines.sglang_harness import assert_idle, text
from sglang_engines.sglang_pools import MEMORY, Found, Host, ask, hosting
from sglang_engines.sglang_recipes import Recipe

from chaos.pool_files import KINDS, harm
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch.client import HttpError

WEIGHTS = "model.safetensors"
LOADED = CHUNKS * CHUNK_TOKENS
CONFIG = f'{{"pool": {{"memory": "{MEMORY}"}}}}'
ROUNDS = int(os.environ.get("PD_POOL_FAULTS", "4"))
KILLED = ("sglang 1", "sglang 64")
PROMPTS = [text(tokens, seed=40 + tokens) for tokens in (140, 300, 700, 1500)]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    sglang = {
        "sglang 1": Recipe(None, 1, config=CONFIG),
        "sglang 64": Recipe(None, 64, tp=2, config=CONFIG),
    }
    with hosting(tmp_path_factory.mktemp("pool"), sglang, {"vllm": {}}) as made:
        yield made


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("vllm", "sglang 1"),
        ("vllm", "sglang 64"),
        ("sglang 64", "vllm"),
        ("sglang 64", "sglang 1"),
    ],
)
def test_what_one_engine_computed_another_kind_loads(host: Host, writer: str, reader: str) -> None:
    """The first prompt of a writer is computed and compared, the next one is loaded."""
    host.audited(writer, reader)
    salt, wanted = host.computed(writer)
    found = ask(host.engines[reader], salt)
    found.assert_same(wanted)
    assert found.loaded == LOADED
    other = ask(host.engines[reader], fresh_salt())
    other.assert_same(wanted)
    assert other.loaded == 0, "another salt shares nothing"


def test_altered_chunks_are_read_by_no_kind(host: Host) -> None:
    for writer, reader in (("vllm", "sglang 64"), ("sglang 1", "vllm")):
        host.audited(writer, reader)
        assert host.audited(writer, reader) == LOADED, "control"
        salt, wanted = host.computed(writer)
        host.pool.damage()
        found = ask(host.engines[reader], salt)
        found.assert_same(wanted)
        assert found.loaded == 0
    assert_idle(*(host.engines[name] for name in ("sglang 1", "sglang 64")))


def test_no_fault_of_an_engine_or_a_file_costs_more_than_a_computation(host: Host) -> None:
    wanted = [ask(host.engines["vllm"], fresh_salt(), prompt) for prompt in PROMPTS]
    ended = Counter[str]()
    for writer, victim in itertools.permutations(("vllm", *KILLED), 2):
        if victim in KILLED:
            host.audited(writer, victim)
    for number in range(ROUNDS):
        dice = random.Random(number)
        victim, other = dice.sample(KILLED, 2)
        kind = "kill" if number % 4 == 3 else dice.choice(("stop", "stop one", *KINDS))
        _round(host, victim, other, kind, dice, wanted, ended)
    print(dict(ended))
    assert ended["loaded"] >= ROUNDS / 2, "control"


def _round(
    host: Host,
    victim: str,
    other: str,
    kind: str,
    dice: random.Random,
    wanted: Sequence[Found],
    ended: Counter[str],
) -> None:
    """One fault of an engine that loads what another has saved, and saves itself. The other engine is asked for the same."""
    stored = [dice.randrange(len(PROMPTS)) for _ in range(3)]
    salts = [host.computed(dice.choice(("vllm", other)), PROMPTS[place])[0] for place in stored]
    asked = [*zip(stored, salts, strict=True)]
    asked += [(dice.randrange(len(PROMPTS)), fresh_salt()) for _ in range(2)]
    dice.shuffle(asked)
    engine = host.engines[victim]
    assert engine.family is not None

    def send(threads: ThreadPoolExecutor, name: str) -> list[tuple[int, Future[Found]]]:
        return [
            (place, threads.submit(ask, host.engines[name], salt, PROMPTS[place]))
            for place, salt in asked
        ]

    with ThreadPoolExecutor(2 * len(asked)) as threads:
        answers = send(threads, victim)
        time.sleep(dice.random() * 0.5)  # the fault falls into any step
        one = dice.choice(sorted(process.pid for process in engine.family.members()))
        if kind == "kill":
            os.kill(one, signal.SIGKILL)
        elif kind == "stop one":
            os.kill(one, signal.SIGSTOP)
        else:
            engine.pause()
        try:
            if kind in KINDS:
                for _ in range(dice.randrange(1, 12)):
                    harm(host.pool.files(), kind, dice)
            beside = send(threads, other)
            for place, answer in beside:
                answer.result().assert_same(wanted[place])
        finally:
            if kind == "kill":
                engine.kill()
            else:
                engine.resume()
        for place, answer in answers:
            try:
                found = answer.result()
            except (OSError, HttpError):
                assert kind == "kill"
                ended["lost with its engine"] += 1
                continue
            found.assert_same(wanted[place])
            ended["loaded" if found.loaded else "computed"] += 1
    if kind == "kill":
        starts = host.in_use(victim)
        engine.start().wait_ready()
        host.wait_in_use(victim, starts)
        for writer in ("vllm", other):
            host.audited(writer, victim)
        host.audited(victim, other)
    assert_idle(host.engines[victim], host.engines[other])
    for name in (victim, other):
        host.assert_nothing_held(name)


_SENDS_TENSORS = """
import io, json, sys
from multiprocessing.reduction import ForkingPickler
from base64 import b64encode
from urllib.request import Request, urlopen

import torch.multiprocessing
from safetensors.torch import load_file

torch.multiprocessing.set_sharing_strategy("file_system")

def post(path, **fields):
    body = json.dumps(fields).encode()
    request = Request(sys.argv[1] + path, body, {"Content-Type": "application/json"})
    assert json.loads(urlopen(request, timeout=120).read())["success"]

tensors = []
for _ in range(int(sys.argv[3])):  # one for each rank
    file = io.BytesIO()
    ForkingPickler(file).dump(list(load_file(sys.argv[2]).items()))
    tensors.append(b64encode(file.getvalue()).decode())
post("/begin_weight_update")
post("/update_weights_from_tensor", serialized_named_tensors=tensors)
post("/end_weight_update")
"""


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    folder = shutil.copytree(MODEL_DIR, tmp_path_factory.mktemp("weights") / "model")
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if "k_proj" in name:
            tensors[name] = tensor.neg()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def test_after_an_update_of_weights_two_ranks_use_nothing_of_before(
    host: Host, other_weights: Path
) -> None:
    name = "sglang 64"
    engine, reader = host.engines[name], host.engines["sglang 1"]
    salt, old = host.computed(name)
    for writer, other in (("sglang 1", name), (name, "sglang 1")):
        host.audited(writer, other)
        assert host.audited(writer, other) == LOADED, "control"

    def load_from(folder: Path) -> None:
        starts = host.in_use(name)
        told = engine.client.post("/update_weights_from_disk", {"model_path": str(folder)})
        assert told["success"]
        host.wait_in_use(name, starts)

    load_from(other_weights)
    host.assert_nothing_held(name)
    files = set(host.pool.files())
    new = ask(engine, salt)
    assert new.loaded == 0
    with pytest.raises(AssertionError):
        new.assert_same(old)  # control: other weights answer otherwise
    host.wait_for_files(files, 2 * CHUNKS)
    found = ask(reader, salt)
    assert found.loaded == LOADED
    found.assert_same(old)

    subprocess.run(
        [sys.executable, "-c", _SENDS_TENSORS, engine.base_url, MODEL_DIR / WEIGHTS, "2"],
        check=True,
    )
    host.assert_nothing_held(name)
    files = set(host.pool.files())
    for each in (salt, fresh_salt()):
        found = ask(engine, each)
        found.assert_same(old)  # the tensors are those of the old weights, and no file says so
        assert found.loaded == 0
    host.assert_nothing_held(name)
    assert set(host.pool.files()) == files

    load_from(MODEL_DIR)
    found = ask(engine, salt)
    found.assert_same(old)
    assert found.loaded == LOADED
    assert_idle(engine, reader)
