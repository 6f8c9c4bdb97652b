import pytest
from harness import assert_same_logprobs, completion, two_step, fresh_salt
from pairs import Pair, Setup
from tools import TOLERANCE
from test_handoff import prompt_of
from pd_connector.tools.launch import VllmEngine

plain = VllmEngine.command
def command(self):
    words = plain(self)
    at = words.index("vllm.entrypoints.openai.api_server")
    model = words[at + 2]
    words[at - 1:at + 3] = ["/tmp/mc/serve.py", "serve", model]
    return words
VllmEngine.command = command

TWO = Setup.of(worker_apart=True, prefill_args=["--data-parallel-size", "2"], decode_args=["--api-server-count", "2"])

@pytest.mark.parametrize("setup", [TWO], indirect=True, ids=["two"])
def test_two_api_servers(pair: Pair, reference) -> None:
    prompts = [prompt_of(100 + n, start=600 + 200 * n) for n in range(6)]
    answers = [completion(pair.router, p) for p in prompts]
    answers += [two_step(pair.p, pair.d, p, cache_salt=fresh_salt()) for p in prompts]
    for e in (pair.p, pair.d):
      for _ in range(2):
        m = e.metrics()
        print({k[0] + str(sorted(dict(k[1]).items())): v for k, v in m.items() if k[0].startswith("pd_connector") and any(w in k[0] for w in ("received_transfers", "landing_slots", "leased_pages", "outgoing_transfers", "sent_bytes"))})
    print(pair.router.log_path.read_text()[-1500:])
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
