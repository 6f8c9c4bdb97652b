# SPDX-License-Identifier: Apache-2.0
"""Which requests come into SGLang's queues. Those that do not are SGLang's own `Req`, ended as it ends them."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from pd_connector.sglang.admission import MAX_ROOM, Admission, host_problem, room_problem
from pd_connector.sglang.hooks import BACKEND, _admit

VOCABULARY = 259


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=0))


class Queue:
    """As much of one of SGLang's queues as the hook around its `add` sees."""

    def __init__(self, role: str, *, in_step: bool = True) -> None:
        admission = Admission(
            produces=role == "prefill", vocabulary=VOCABULARY, most_logprobs=128, in_step=in_step
        )
        self.transfer_backend = SimpleNamespace(value=BACKEND)
        self.told: list[Req] = []
        self.kv_manager = SimpleNamespace(
            rank=SimpleNamespace(
                produces=role == "prefill", admission=admission, refused=self.told.append
            ),
        )
        self.scheduler = SimpleNamespace(retire_unadmitted_request=self._retire)
        self.admitted: list[Req] = []
        self.retired: list[Req] = []

    def add(self, req: Req, **options: Any) -> None:
        _admit(self._add, self, req, **options)

    def _add(self, queue: Any, req: Req, **options: Any) -> None:
        self.admitted.append(req)
        req.disagg_kv_sender = object()  # type: ignore[assignment]

    def _retire(self, req: Req) -> None:
        req.update_finish_state()
        self.retired.append(req)

    def refusal(self, req: Req) -> str:
        """What a request is answered that does not come in."""
        self.add(req)
        assert (self.admitted, self.retired) == ([], [req])
        assert (req.finished_reason.status_code, req.output_ids) == (400, array("q"))
        return str(req.finished_reason.message)


def request(
    ids: Any = (1, 2, 3), *, host: Any = "127.0.0.1", room: Any = 5, top_logprobs: int | None = None
) -> Req:
    made = Req(
        "r",
        "",
        array("q", ids),
        SamplingParams(),
        bootstrap_host=host,
        bootstrap_room=room,
        return_logprob=top_logprobs is not None,
        top_logprobs_num=top_logprobs or 0,
        vocab_size=VOCABULARY,
    )
    made.disagg_kv_sender = None  # type: ignore[assignment]
    return made


both = pytest.mark.parametrize("role", ["prefill", "decode"])


@pytest.mark.parametrize("room", [1, 7, 1 << 62, MAX_ROOM])
def test_any_positive_number_of_64_bits_is_a_room(room: int) -> None:
    assert room_problem(room) == ""


@pytest.mark.parametrize("room", [None, 0, -1, 1 << 63, 1 << 64, 1.5, 1.0, True, "7", [7]])
@both
def test_rooms_that_would_end_an_engine_are_refused(role: str, room: Any) -> None:
    """SGLang itself writes the room into a tensor of 64-bit numbers; one that does not fit raises in
    its loop, and the engine ends."""
    queue = Queue(role)
    assert "bootstrap_room" in queue.refusal(request(room=room))
    assert not queue.told


@pytest.mark.parametrize("host", [None, "", 7, ["a"], "x" * 254])
def test_hosts_that_would_end_an_engine_are_refused(host: Any) -> None:
    """SGLang would make an address of it in its loop. A prefill engine asks nobody."""
    assert "bootstrap_host" in Queue("decode").refusal(request(host=host))
    prefill = Queue("prefill")
    prefill.add(request(host=host))
    assert prefill.admitted
    assert host_problem("127.0.0.1") == host_problem("x" * 253) == ""


@pytest.mark.parametrize("token", [-1, VOCABULARY, 100_000, 1 << 62])
@both
def test_tokens_that_are_none_of_the_models_are_refused(role: str, token: int) -> None:
    """SGLang looks them up all the same, and the engine ends."""
    queue = Queue(role)
    assert f"token {token} in the prompt" in queue.refusal(request([1, token, 2]))
    assert bool(queue.told) == (role == "prefill"), "a decode engine of another kind is told"


@both
def test_a_prompt_without_a_token_is_refused(role: str) -> None:
    """SGLang refuses it itself only where a request has one prompt, not in a list of them; the prefill engine
    has then no KV to give back, and ends."""
    queue = Queue(role)
    assert "the prompt is empty" in queue.refusal(request([]))
    assert bool(queue.told) == (role == "prefill"), "a decode engine of another kind is told"


def test_what_sglang_puts_in_place_of_images_is_no_token() -> None:
    queue, asked = Queue("prefill"), request([1, 1 << 30, 2])
    asked.multimodal_inputs = SimpleNamespace()  # type: ignore[assignment]
    queue.add(asked)
    assert queue.admitted


@both
def test_more_logprobs_than_pass_are_refused(role: str) -> None:
    """SGLang raises in its loop where they are more than its buffers have room for."""
    assert "top_logprobs_num 129: must be at most 128" in Queue(role).refusal(
        request(top_logprobs=129)
    )
    queue = Queue(role)
    queue.add(request(top_logprobs=128))
    assert queue.admitted


@both
def test_a_room_is_one_requests_until_it_has_left(role: str) -> None:
    """SGLang gives all answers of a request one room (`n`): the second ended the first, with status 500."""
    queue = Queue(role)
    queue.kv_manager.rank.admission.enter(5)
    refusal = queue.refusal(request(room=5))
    assert "another request uses it" in refusal
    assert "n 1" in refusal
    assert not queue.told, "the first's transfer is left alone"
    queue.kv_manager.rank.admission.leave(5)
    queue.add(request(room=5))
    assert queue.admitted


def test_stages_of_a_pipeline_do_not_ask_whether_a_room_is_in_use() -> None:
    """A request may have ended on the first and not yet on the second: if one took the next request with its room
    and the other did not, their collective operations would never end."""
    queue = Queue("prefill", in_step=False)
    queue.kv_manager.rank.admission.enter(5)
    queue.add(request(room=5))
    assert queue.admitted


@pytest.mark.parametrize("option", ["is_retracted", "is_rebootstrap"])
def test_a_request_that_comes_back_is_not_looked_at_again(option: str) -> None:
    queue = Queue("decode")
    queue.kv_manager.rank.admission.enter(5)
    queue.add(request(room=5), **{option: True})
    assert queue.admitted


@both
def test_what_sglang_has_refused_is_answered_in_its_own_words(role: str) -> None:
    """A session that is not there: SGLang makes a request of it that has no room."""
    queue, asked = Queue(role), request(room=None)
    asked.set_finish_with_abort("session id s does not exist")
    queue.add(asked)
    assert (queue.admitted, queue.retired) == ([asked], [])
    assert asked.to_finish.message == "session id s does not exist"
