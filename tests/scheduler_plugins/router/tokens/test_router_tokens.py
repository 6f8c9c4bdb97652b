# SPDX-License-Identifier: Apache-2.0
"""Which part tokenizes prompts for the index, and what engines are sent then."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any, cast

import pytest
from router_fakes import FakeEngine, World, run, until

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.prompt.body import with_tokens
from scheduler_plugins.router.tokens import worker_pool
from scheduler_plugins.router.tokens.agreement import difference
from scheduler_plugins.router.tokens.token_worker import (
    _TEXTS,
    Examined,
    TokenizerError,
    _load,
    examine,
    files_digest,
    tokenize,
)
from scheduler_plugins.router.tokens.worker_pool import _Process

WORDS = ["<unk>", "user", ":", "hello", "world", "!", "you"]
TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture(scope="module")
def process() -> Iterator[_Process]:
    process = _Process()
    yield process
    process.close()


@pytest.fixture
def own_process() -> None:
    """The test's router starts its worker process, and ends it."""


@pytest.fixture(autouse=True)
def one_worker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, process: _Process
) -> None:
    """Each process takes seconds to start. It serves one model after the other, so these tests share it."""
    monkeypatch.setattr(worker_pool, "WORKERS", 1)
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(worker_pool, "_Process", lambda: process)
        monkeypatch.setattr(worker_pool.WorkerPool, "close", lambda pool: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a model's, with a tokenizer of seven words."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    declare(tmp_path)
    return tmp_path


def declare(model: Path, **settings: Any) -> None:
    """Write `tokenizer_config.json`, with these settings."""
    content = {"chat_template": TEMPLATE, "unk_token": "<unk>", **settings}
    (model / "tokenizer_config.json").write_text(json.dumps(content))


def ids(model: Path, asked: dict[str, Any]) -> list[int]:
    return token_list(tokenize(str(model), files_digest(str(model)), asked))


def as_model(engine: FakeEngine, model: Path) -> None:
    """Give an engine the tokenizer of these files as they are now, loaded as engines load it."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(model))

    def read(asked: dict[str, Any]) -> list[int]:
        if "messages" not in asked:
            special = asked.get("add_special_tokens", True)
            return loaded.encode(asked["prompt"], add_special_tokens=special)
        chat = {"add_generation_prompt": True, "tokenize": False}
        return loaded.encode(loaded.apply_chat_template(asked["messages"], **chat))

    engine.tokenize, engine.detokenize = read, loaded.decode


def test_a_prompt_and_a_chat_are_tokenized_as_the_model_says(model: Path) -> None:
    assert ids(model, {"prompt": "hello world"}) == [3, 4]
    chat = {"messages": [{"role": "user", "content": "hello you"}]}
    assert ids(model, chat) == [1, 2, 3, 6, 5]
    assert ids(model, {**chat, "add_generation_prompt": False}) == [
        1,
        2,
        3,
        6,
    ]


def test_what_cannot_be_tokenized_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        examine(str(tmp_path / "nowhere"))
    with pytest.raises(TokenizerError, match="no engine reports the folder"):
        examine("")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no') }}"})
    )
    with pytest.raises(TokenizerError, match="template failed"):
        ids(model, {"messages": []})


def test_a_template_may_not_reach_outside(model: Path) -> None:
    """A model's template is a program of others: it runs in a sandbox."""
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(reach)
    with pytest.raises(TokenizerError, match="template failed"):
        ids(model, {"messages": []})


@pytest.mark.parametrize("field", ["echo", "suffix", "truncate_prompt_tokens"])
def test_text_stays_text_where_the_engine_reads_it(field: str) -> None:
    assert with_tokens({"prompt": "a"}, [1]) == {"prompt": [1]}
    kept = {"prompt": "a", field: 1}
    assert with_tokens(kept, [1]) == kept
    assert with_tokens({"messages": []}, [1]) == {"messages": []}


async def followed(world: World) -> None:
    """Pretend that the first engine sends KV events: without any, nobody tokenizes."""
    pool = world.app[SHARED].pool
    pool.caches.follow(pool.engines[0], "ipc:///nowhere/at/all", None)


async def learnt(world: World) -> None:
    await until(lambda: world.app[SHARED].tokens._model is not None, "the model is known")


async def knows(world: World, source: str) -> None:
    """Wait until the router knows who tokenizes. The first request makes it ask."""
    tokens = world.app[SHARED].tokens
    await world.complete()
    await learnt(world)
    assert tokens.source == source
    for engine in world.p + world.d:
        engine.bodies.clear()


async def prompts(world: World, prompt: Any) -> list[Any]:
    """What both sides are sent."""
    assert (await world.complete(prompt=prompt)).status == 200
    return [engine.bodies[-1]["prompt"] for engine in (world.p[0], world.d[0])]


@pytest.mark.usefixtures("own_process")
def test_both_sides_get_the_tokens_of_a_tokenizer_that_agrees_with_theirs(model: Path) -> None:
    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            for engine in world.p + world.d:
                as_model(engine, model)
            assert await prompts(world, "hello world") == ["hello world"] * 2
            await followed(world)
            await knows(world, "tokenizer")
            assert await prompts(world, "hello world") == [[3, 4]] * 2

    run(scenario())


def test_a_tokenizer_that_nobody_confirms_serves_the_index_only(model: Path) -> None:
    async def scenario() -> None:
        async with World() as world:
            for engine in world.p + world.d:
                engine.model_root = str(model)
            await followed(world)
            await knows(world, "tokenizer")
            assert await prompts(world, "hello world") == ["hello world"] * 2
            tokenized = await world.app[SHARED].tokens.of({"prompt": "hello world", "model": "m"})
            assert tokenized.tokens == token_bytes([3, 4])
            other = await world.app[SHARED].tokens.of({"prompt": [9], "model": "adapter"})
            assert other[:2] == (token_bytes([9]), "adapter")

    run(scenario())


def test_a_tokenizer_that_differs_is_not_used(model: Path) -> None:
    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            for engine in world.p + world.d:
                engine.tokenize = lambda asked: [7, 7]
            await followed(world)
            await knows(world, "engine")
            assert await prompts(world, "hello world") == ["hello world"] * 2
            tokens = await world.app[SHARED].tokens.of({"prompt": "hello world"})
            assert tokens == (token_bytes([7, 7]), "", "")

    run(scenario())


@pytest.mark.parametrize(
    "odd", [{"prompt": "\ud800"}, {"prompt": "hello", "add_special_tokens": {"a": [1]}}]
)
def test_a_prompt_that_no_tokenizer_takes_is_sent_all_the_same(
    model: Path, odd: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            await followed(world)
            await knows(world, "tokenizer")
            assert (await world.complete(**odd)).status == 200

    run(scenario())


def test_a_prompt_that_would_take_seconds_is_not_tokenized(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("scheduler_plugins.router.tokens.prompt_tokens.MOST_CHARACTERS", 20)
        async with World(tokenizer=str(model)) as world:
            await followed(world)
            await knows(world, "tokenizer")
            tokens = world.app[SHARED].tokens
            assert (await tokens.of({"prompt": "hello world"})).tokens is not None
            assert (await tokens.of({"prompt": "hello " * 10})).tokens is None
            chat = [{"role": "user", "content": "hello " * 10}]
            assert (await tokens.of({"messages": chat})).tokens is None

    run(scenario())


def test_one_clients_bad_prompt_takes_the_tokens_from_nobody(model: Path) -> None:
    async def scenario() -> None:
        async with World() as world:

            def tokenizer(asked: dict[str, Any]) -> list[int]:
                if asked.get("prompt") == "bad":
                    raise ValueError("the engine answers 500")
                return [7, 7]

            for engine in world.p + world.d:
                engine.tokenize = tokenizer
            await followed(world)
            await world.complete()
            await learnt(world)
            assert await prompts(world, "bad") == ["bad"] * 2
            tokens = await world.app[SHARED].tokens.of({"prompt": "good"})
            assert tokens.tokens == token_bytes([7, 7])

    run(scenario())


def test_prompts_for_another_model_keep_their_text(model: Path) -> None:
    """Its engine would take one model's ids for the other's."""

    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            for engine in world.p + world.d:
                as_model(engine, model)
            await followed(world)
            await knows(world, "tokenizer")
            assert (await world.complete(model="another", prompt="hello world")).status == 200
            assert world.d[0].bodies[-1]["prompt"] == "hello world"
            assert (await world.complete(model="adapter", prompt="hello world")).status == 200
            assert (await world.app[SHARED].tokens.of({"prompt": "hello"})).tokens is not None

    run(scenario())


def test_engines_with_a_key_tokenize_for_the_router() -> None:
    async def scenario() -> None:
        async with World(api_key="secret") as world:
            tokens = world.app[SHARED].tokens
            assert tokens._headers["Authorization"] == "Bearer secret"

    run(scenario())


def test_without_tokenizer_and_endpoint_prompts_are_known_by_their_text() -> None:
    async def scenario() -> None:
        async with World() as world:
            await followed(world)
            await world.complete()
            await learnt(world)
            assert await prompts(world, "hello world") == ["hello world"] * 2
            assert (await world.get("/health")).json["tokens"] == "text"

    run(scenario())


def test_engines_that_start_anew_with_another_tokenizer_get_no_ids_of_the_old_one(
    model: Path,
) -> None:
    """Their model has the same name (`--served-model-name`), so nothing but their tokens tells them apart."""

    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            engines = world.p + world.d
            for engine in engines:
                as_model(engine, model)
            await followed(world)
            await knows(world, "tokenizer")
            assert await prompts(world, "hello world") == [[3, 4]] * 2
            for engine in engines:
                await engine.die()
                await world.down(engine)
                engine.tokenize = lambda asked: [8, 8]
                await engine.start()
                await world.up(engine)
            await until(lambda: world.known(world.p[0]).address is not None, "it hands over again")
            assert await prompts(world, "hello world") == ["hello world"] * 2
            tokens = world.app[SHARED].tokens
            while tokens.source != "engine":  # requests make it look
                assert (await prompts(world, "hello world"))[0] != [3, 4]
            assert await prompts(world, "hello world") == ["hello world"] * 2

    run(scenario())


def test_engines_that_do_not_tokenize_alike_are_sent_text(model: Path) -> None:
    """As while they are replaced one after the other by those of another model."""

    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            as_model(world.p[0], model)
            world.d[0].tokenize = lambda asked: [8, 8]
            await followed(world)
            await world.complete()
            await learnt(world)
            assert await prompts(world, "hello world") == ["hello world"] * 2

    run(scenario())


def special(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True, **flags}


DECLARED = {
    "pad": {"pad_token": "<x>"},
    "eos": {"eos_token": "<x>"},
    "extra": {"extra_special_tokens": ["<x>"]},
    "additional": {"additional_special_tokens": ["<x>"]},
    "added_tokens_decoder": {"added_tokens_decoder": {"7": special("<x>")}},
    "a plain word": {"added_tokens_decoder": {"3": special("hello")}},
}
"""Ways to declare a token outside `tokenizer.json`."""
HAS_IT = {"a plain word": "hellohello world"}
"""Prompts that such a token changes, where it is not `<x>`."""


@pytest.mark.parametrize("way", DECLARED)
def test_a_token_that_is_declared_elsewhere_is_read_as_engines_read_it(
    model: Path, way: str
) -> None:
    from tokenizers import Tokenizer

    declare(model, **DECLARED[way])
    engine = FakeEngine("e")
    as_model(engine, model)
    assert engine.tokenize is not None
    asked = {"prompt": HAS_IT.get(way, "hello<x>world")}
    assert ids(model, asked) == engine.tokenize(asked)
    alone = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert ids(model, asked) != alone.encode(asked["prompt"]).ids, "one file does not tell"


def test_a_special_token_that_is_split_is_read_as_engines_read_it(model: Path) -> None:
    declare(model, pad_token="user")
    assert ids(model, {"prompt": "useruser"}) == [1, 1]
    declare(model, pad_token="user", split_special_tokens=True)
    assert ids(model, {"prompt": "useruser"}) == [0]


def differences(engine: FakeEngine, examined: Examined) -> str | None:
    """What the comparison of an engine with examined files says."""

    async def ask(_: Any, path: str, asked: dict[str, Any]) -> object:
        assert engine.tokenize is not None
        assert engine.detokenize is not None
        if path == "/tokenize":
            return {"tokens": engine.tokenize(asked)}
        return {"prompt": engine.detokenize(asked["tokens"])}

    return asyncio.run(difference(ask, cast(Any, engine), examined, "m"))


@pytest.mark.parametrize("declares", ["engine", "files"])
@pytest.mark.parametrize("way", DECLARED)
def test_one_special_token_more_is_seen(model: Path, way: str, declares: str) -> None:
    """An engine may have another `--tokenizer`, or another version of transformers."""
    engine = FakeEngine("e")
    declare(model, **(DECLARED[way] if declares == "engine" else {}))
    as_model(engine, model)
    assert differences(engine, examine(str(model))) == ""
    declare(model, **(DECLARED[way] if declares == "files" else {}))
    examined = examine(str(model))
    assert differences(engine, examined)
    common = [(asked, ids) for asked, ids in examined.probes if asked.get("prompt") in _TEXTS]
    few = examined._replace(probes=tuple(common), unknown_id=100)
    assert len(common) == len(_TEXTS)
    assert differences(engine, few) == "", "common text does not tell"


def test_an_engine_that_knows_more_tokens_than_the_files_is_seen(model: Path) -> None:
    """None of the files' own tokens shows it."""
    engine = FakeEngine("e")
    declare(model, pad_token="<in no probe>")
    as_model(engine, model)
    declare(model)
    assert "from id 7 on" in str(differences(engine, examine(str(model))))


def test_an_engine_that_does_not_tell_is_not_taken_for_alike(model: Path) -> None:
    async def silent(_: Any, path: str, asked: dict[str, Any]) -> object:
        return {"error": "busy"}

    found = difference(silent, cast(Any, None), examine(str(model)), "m")
    assert asyncio.run(found) is None


@pytest.mark.parametrize("differs", ["prefill", "decode"])
def test_no_ids_are_sent_where_one_engine_has_a_token_more(model: Path, differs: str) -> None:
    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            other, same = (world.d, world.p) if differs == "decode" else (world.p, world.d)
            as_model(same[0], model)
            declare(model, pad_token="<x>")
            as_model(other[0], model)
            declare(model)
            await followed(world)
            await knows(world, "engine")
            assert await prompts(world, "hello<x>world") == ["hello<x>world"] * 2
            assert other[0].url in (await world.get("/health")).json["token_ids"]

    run(scenario())


def test_an_engine_that_comes_later_gets_ids_once_it_has_been_compared(model: Path) -> None:
    async def scenario() -> None:
        async with World(decode=2, tokenizer=str(model)) as world:
            first, later = world.d
            await later.die()
            await world.down(later)
            for engine in world.p + world.d:
                as_model(engine, model)
            await followed(world)
            await knows(world, "tokenizer")
            assert await prompts(world, "hello world") == [[3, 4]] * 2
            compares, right = asyncio.Event(), later.tokenize
            assert right is not None
            later.tokenize = lambda asked: right(asked) if compares.is_set() else 1 / 0
            await later.start()
            await world.up(later)
            await first.die()
            await world.down(first)
            assert (await world.complete(prompt="hello world")).status == 200
            assert later.bodies[-1]["prompt"] == "hello world"
            compares.set()
            tokens = world.app[SHARED].tokens
            digest = files_digest(str(model))
            while not tokens.confirmed(digest, world.known(later)):
                tokens._learn_at_s = 0.0
                await world.complete(prompt="hello world")
            assert (await world.complete(prompt="hello world")).status == 200
            assert later.bodies[-1]["prompt"] == [3, 4]

    run(scenario())


def test_a_process_that_starts_later_loads_no_other_files(model: Path) -> None:
    examined = examine(str(model))
    declare(model, pad_token="<x>")
    _load.cache_clear()  # as in another process
    with pytest.raises(TokenizerError, match="changed"):
        tokenize(str(model), examined.digest, {"prompt": "hello<x>"})


_ROUTER = """
import asyncio, os
from scheduler_plugins.router.tokens.worker_pool import _Process

if __name__ == "__main__":
    print(asyncio.run(_Process().do(60.0, os.getpid)), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_tokenizes_ends_with_a_router_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "router.py"
    program.write_text(_ROUTER)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as router:
        assert router.stdout is not None
        pid = int(router.stdout.readline())
        tokenizing = os.pidfd_open(pid)
        try:
            assert router.wait(60.0) == -signal.SIGKILL
            ended, _, _ = select.select([tokenizing], [], [], 60.0)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            assert ended
        finally:
            os.close(tokenizing)


def test_a_process_that_has_ended_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks waited for it. The second one that hears of its end must not forget the process that the next task began."""
    began: list[Any] = []

    class Executor:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.asked: list[Future[Any]] = []
            began.append(self)

        def submit(self, *_: Any) -> Future[Any]:
            self.asked.append(Future())
            return self.asked[-1]

    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", Executor)

    async def asks() -> None:
        process = _Process()

        async def asked() -> asyncio.Task[Any]:
            task = asyncio.create_task(process.do(60.0, os.getpid))
            await asyncio.sleep(0)
            return task

        first, second = await asked(), await asked()
        began[0].asked[0].set_exception(BrokenExecutor())
        with pytest.raises(BrokenExecutor):
            await first
        third = await asked()
        began[0].asked[1].set_exception(BrokenExecutor())
        with pytest.raises(BrokenExecutor):
            await second
        fourth = await asked()
        assert [len(each.asked) for each in began] == [2, 2]
        for answer in began[1].asked:
            answer.set_result(1)
        assert await third == await fourth == 1

    asyncio.run(asks())
