# SPDX-License-Identifier: Apache-2.0
"""What the ingress does when a decode replica dies; without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress

from pd_connector.ray.servers import SecondChanceIngress

DIES = RayActorError()


class Decode:
    """The handle of a decode deployment: for each request, what its replica says before it dies."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.completions = SimpleNamespace(remote=self._answer)

    async def _answer(self, request, raw_request_info):
        for chunk in self.answers.pop(0):
            if chunk is DIES:
                raise DIES
            yield chunk


def answered(decode, ingress=SecondChanceIngress):
    made = ingress.__new__(ingress)

    async def model(name):
        return name

    made._get_model_id, made._get_configured_serve_handle = model, lambda _: decode

    async def run():
        body = CompletionRequest(model="m", prompt="hello")
        answer = made._get_response(body=body, call_method="completions")
        while True:
            try:
                found.append(await anext(answer))
            except StopAsyncIteration:
                return
            except RayActorError:
                found.append(DIES)
                return

    found = []
    asyncio.run(run())
    return found


def test_a_request_whose_replica_dies_is_sent_to_another():
    decode = Decode([DIES], ["a", "b"])
    assert answered(decode) == ["a", "b"]


def test_rays_own_ingress_loses_it():
    """The control."""
    assert answered(Decode([DIES], ["a", "b"]), OpenAiIngress) == [DIES]


@pytest.mark.parametrize("said", [[DIES], ["a", DIES]])
def test_it_gets_one_more_chance_only(said):
    decode = Decode([DIES], said, ["never asked"])
    assert answered(decode) == said
    assert decode.answers == [["never asked"]]


def test_a_begun_answer_is_not_begun_anew():
    decode = Decode(["a", DIES], ["never asked"])
    assert answered(decode) == ["a", DIES]
    assert decode.answers == [["never asked"]]
