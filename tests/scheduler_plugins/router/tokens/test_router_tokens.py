# SPDX-License-Identifier: Apache-2.0
"""Who tokenizes prompts for the index, and what engines are sent then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from router_fakes import World, run, until

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.prompt.body import with_tokens
from scheduler_plugins.router.tokens.token_worker import TokenizerError, tokenize

WORDS = ["<unk>", "user", ":", "hello", "world", "!", "you"]
TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}!{% endif %}"
Tokenize = Callable[[dict[str, Any]], list[int]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a model's, with a tokenizer of seven words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


def as_model(model: Path) -> Tokenize:
    """An engine's tokenizer that agrees with the model's files."""
    return lambda asked: token_list(tokenize(str(model), asked))


def test_a_prompt_and_a_chat_are_tokenized_as_the_model_says(model: Path) -> None:
    assert token_list(tokenize(str(model), {"prompt": "hello world"})) == [3, 4]
    chat = {"messages": [{"role": "user", "content": "hello you"}]}
    assert token_list(tokenize(str(model), chat)) == [1, 2, 3, 6, 5]
    assert token_list(tokenize(str(model), {**chat, "add_generation_prompt": False})) == [
        1,
        2,
        3,
        6,
    ]


def test_what_cannot_be_tokenized_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        tokenize(str(tmp_path / "nowhere"), {"prompt": "x"})
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no') }}"})
    )
    with pytest.raises(TokenizerError, match="template failed"):
        tokenize(str(model), {"messages": []})


def test_a_template_may_not_reach_outside(model: Path) -> None:
    """A model's template is a program of others: it runs in a sandbox."""
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(reach)
    with pytest.raises(TokenizerError, match="template failed"):
        tokenize(str(model), {"messages": []})


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


async def knows(world: World, source: str) -> None:
    """Wait until the router knows who tokenizes. The first request makes it ask."""
    tokens = world.app[SHARED].tokens
    await world.complete()
    await until(lambda: tokens._model is not None, "the model is known")
    assert tokens.source == source
    for engine in world.p + world.d:
        engine.bodies.clear()


async def prompts(world: World, prompt: Any) -> list[Any]:
    """What both sides are sent."""
    assert (await world.complete(prompt=prompt)).status == 200
    return [engine.bodies[-1]["prompt"] for engine in (world.p[0], world.d[0])]


def test_both_sides_get_the_tokens_of_a_tokenizer_that_agrees_with_theirs(model: Path) -> None:
    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            for engine in world.p + world.d:
                engine.tokenize = as_model(model)
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
            assert await prompts(world, "hello world") == [[7, 7]] * 2

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
            await until(lambda: world.app[SHARED].tokens._model is not None, "the model is known")
            assert await prompts(world, "bad") == ["bad"] * 2
            assert await prompts(world, "good") == [[7, 7]] * 2

    run(scenario())


def test_prompts_for_another_model_keep_their_text(model: Path) -> None:
    """Its engine would take one model's ids for the other's."""

    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            for engine in world.p + world.d:
                engine.tokenize = as_model(model)
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
            await until(lambda: world.app[SHARED].tokens._model is not None, "the model is known")
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
                engine.tokenize = as_model(model)
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
            assert await prompts(world, "hello world") == [[8, 8]] * 2

    run(scenario())


def test_engines_that_do_not_tokenize_alike_are_sent_text(model: Path) -> None:
    """As while they are replaced one after the other by those of another model."""

    async def scenario() -> None:
        async with World(tokenizer=str(model)) as world:
            world.p[0].tokenize = as_model(model)
            world.d[0].tokenize = lambda asked: [8, 8]
            await followed(world)
            await world.complete()
            await until(lambda: world.app[SHARED].tokens._model is not None, "the model is known")
            assert await prompts(world, "hello world") == ["hello world"] * 2

    run(scenario())
