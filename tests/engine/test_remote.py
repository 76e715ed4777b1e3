"""`RemoteEngine` on a real vLLM server, and on small servers that are wrong in one way each.

The real one is vLLM's CPU build with SmolLM2: about 20 s until it answers, once for the whole file.
"""

import asyncio
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from launch import find_warm_python
from openai_servers import ASKED, serve_app
from serving import CHAT, http, new_log, serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import AutoTokenizer
from vllm_server import serve_vllm

from polar_trl.engine import openai_server
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.openai_server import OpenAIServer, RefusedError
from polar_trl.engine.remote import NoTokenIdsError, RemoteEngine, ServedModel, find_served_model
from polar_trl.errors import ConfigError, EngineBusyError, EngineError
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Completion, Message, TokenIds

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["Count from one to ten.", "Run this shell command: echo red > cat.txt", "Name a colour."]
GREEDY = GenerationParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def vllm_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `vllm serve` with processed logprobs."""
    options = ("--served-model-name", "smol", "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
    with serve_vllm(smollm2, tmp_path_factory.mktemp("server") / "log.txt", *options) as url:
        yield f"{url}/v1"


@pytest.fixture()
def connection(vllm_server: str) -> Iterator[OpenAIServer]:
    server = OpenAIServer(vllm_server)
    yield server
    server.close()


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[TokenIds]:
    renderer = load_renderer(AutoTokenizer.from_pretrained(smollm2), str(smollm2))
    return [renderer.render([Message(role="user", text=question)], ()) for question in QUESTIONS]


def generate(engine: RemoteEngine, prompt: TokenIds, params: GenerationParams = GREEDY) -> Completion:
    return asyncio.run(engine.generate(prompt, params))


COLOCATED = """
import asyncio, json, sys
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.standalone import build_standalone_engine
model, prompts = sys.argv[1], json.loads(sys.argv[2])
engine = build_standalone_engine(model, cpu=True, max_model_len=1024, max_num_seqs=4)
async def main():
    params = GenerationParams(max_tokens=16, temperature=0.0)
    return [await engine.generate(tuple(prompt), params) for prompt in prompts]
found = asyncio.run(main())
engine.close()
print("\\n" + json.dumps([[list(c.token_ids), list(c.logprobs), c.finish_reason] for c in found]))
"""


def test_it_samples_what_the_colocated_engine_samples(
    connection: OpenAIServer, prompts: list[TokenIds], smollm2: Path
) -> None:
    # in a process of its own: an engine leaves its process group behind
    done = subprocess.run(
        [find_warm_python(), "-c", COLOCATED, str(smollm2), json.dumps(prompts)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    colocated = json.loads(done.stdout.strip().splitlines()[-1])
    model = find_served_model(connection)
    assert model == ServedModel(name="smol", max_model_len=1024)
    engine = RemoteEngine(connection, model="smol", max_model_len=1024)
    for prompt, (token_ids, logprobs, finish_reason) in zip(prompts, colocated, strict=True):
        completion = generate(engine, prompt)
        assert (list(completion.token_ids), completion.finish_reason) == (token_ids, finish_reason)
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-3)
        assert (completion.first_policy_version, completion.last_policy_version) == (0, 0)


def test_the_probe_is_content_and_temperature_is_in_the_logprobs(
    connection: OpenAIServer, prompts: list[TokenIds], smollm2: Path
) -> None:
    engine = RemoteEngine(connection, model="smol", max_model_len=1024)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "naïve 🙂<|im_end|>\n"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    engine.probe(text, ids, GenerationParams(max_tokens=8, temperature=0.7))
    cold = generate(engine, prompts[0], GenerationParams(max_tokens=1, temperature=0.01))
    warm = generate(engine, prompts[0], GenerationParams(max_tokens=1, temperature=0.0))
    assert cold.token_ids == warm.token_ids
    assert cold.logprobs[0] > -1e-3 > warm.logprobs[0]
    whole = generate(engine, prompts[0]).token_ids
    stop = tokenizer.decode(whole)[6:9]
    ended = generate(engine, prompts[0], GenerationParams(max_tokens=16, temperature=0.0, stop=(stop,)))
    # the tokens that spelled the stop text stay
    assert ended.token_ids == next(whole[:n] for n in range(17) if stop in tokenizer.decode(whole[:n]))
    assert ended.finish_reason == "stop"


def test_another_models_tokenizer_is_told(connection: OpenAIServer) -> None:
    engine = RemoteEngine(connection, model="smol", max_model_len=1024)
    with pytest.raises(
        ConfigError, match=r"'smol' .* has another tokenizer than model_name_or_path: .* from number 1 on"
    ):
        engine.probe("hello world, hello", (28120, 5, 6), GREEDY)


def test_a_hang_up_aborts_the_request_on_the_server(connection: OpenAIServer, prompts: list[TokenIds]) -> None:
    engine = RemoteEngine(connection, model="smol", max_model_len=1024)
    metrics = connection.base_url.removesuffix("/v1") + "/metrics"

    def count_running() -> float:
        lines = httpx.get(metrics, timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    async def main() -> None:
        long = GenerationParams(max_tokens=900, temperature=1.0, stop_token_ids=())
        task = asyncio.create_task(engine.generate(prompts[0], long))
        await _wait_for(lambda: count_running() == 1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _wait_for(lambda: count_running() == 0.0)

    # it may reach an end by itself before it is seen running; then once more
    for _ in range(3):
        try:
            asyncio.run(main())
        except TimeoutError:
            continue
        return
    raise AssertionError("the request was never seen running, or was never aborted")


async def _wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


def test_sessions_through_the_proxy_keep_the_servers_ids(
    connection: OpenAIServer, prompts: list[TokenIds], smollm2: Path
) -> None:
    renderer = load_renderer(AutoTokenizer.from_pretrained(smollm2), str(smollm2))
    engine = RemoteEngine(connection, model="smol", max_model_len=1024)
    log = new_log()
    with serve(engine, renderer, params=GREEDY) as proxy:
        endpoint = proxy.open_session(log)
        with http(endpoint) as agent:
            messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
            first = agent.post(CHAT, json={"model": "m", "messages": messages}).json()["choices"][0]["message"]
            messages += [first, {"role": "user", "content": "Go on."}]
            assert agent.post(CHAT, json={"model": "m", "messages": messages}).status_code == 200
    first_call, second_call = log.calls
    assert first_call.prompt_ids == prompts[0]
    assert second_call.parent == 0
    history = first_call.prompt_ids + first_call.completion.token_ids
    assert second_call.prompt_ids[: len(history)] == history


def test_the_command_collects_from_the_server(vllm_server: str, tmp_path: Path) -> None:
    """`polar-trl collect` on shell tasks; what it writes are the ids that the server sampled, and it is resumable."""
    command = [find_warm_python(), "-m", "polar_trl", "collect", "--config", "quickstart"]
    command += ["--base_url", vllm_server, "--limit", "3", "--output_dir", str(tmp_path / "out"), "--json"]
    command += [
        "--min_reward",
        "0.01",
        "--eval_temperature",
        "0",
        "--agent_files",
        "polar_trl/configs/agents/shell_agent.py",
    ]

    def collect(num_samples: int) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [*command, "--num_samples", str(num_samples)], capture_output=True, text=True, timeout=600, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr

    first, said = collect(1)
    assert "3 tasks x 1: 3 sessions are left to run" in said
    assert (first["total"]["attempts"], first["text_only_rows"]) == (3, 0)
    second, said = collect(2)
    assert "3 graded sessions and 0 without a reward are there already, 3 sessions are left to run" in said
    assert second["total"]["attempts"] == 6
    # greedy: the second sample of a task is the first one again
    assert second["total"]["accepted"] == 2 * first["total"]["accepted"] > 0
    from datasets import load_dataset

    rows = load_dataset(second["data_set"], "tokens", split="train", cache_dir=str(tmp_path / "cache"))
    by_session: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for row in rows:
        assert 0 < sum(row["assistant_masks"]) < len(row["input_ids"])
        by_session.setdefault((row["task_id"], row["id"].rsplit("-", 1)[1]), set()).add(tuple(row["input_ids"]))
    assert all(len(ids) == 1 for ids in by_session.values())


# From here on: servers of the test itself.


@pytest.fixture()
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "RETRY_DELAYS_S", (0.01, 0.01))


def complete(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A server that samples 7 and 8, and says so in vLLM's way but for the changes."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [1, 2, 3]
        logprobs = {"token_logprobs": [-0.5, -1.5], "tokens": ["token_id:7", "token_id:8"]}
        choice = {"token_ids": [7, 8], "prompt_token_ids": prompt, "logprobs": logprobs, "finish_reason": "stop"}
        return {"choices": [{name: value for name, value in (choice | changes).items() if value != "absent"}]}

    return answer


def run_fake(answer: Callable[[dict[str, Any]], Any], use: Callable[[RemoteEngine], Any]) -> Any:
    async def completions(request: Request) -> Response:
        body = await request.json()
        ASKED.append(body)
        answered = answer(body)
        return answered if isinstance(answered, Response) else JSONResponse(answered)

    with serve_app({"/v1/completions": completions}) as url:
        server = OpenAIServer(f"{url}/v1")
        try:
            return use(RemoteEngine(server, model="m", max_model_len=100))
        finally:
            server.close()


def test_everything_that_shapes_the_distribution_is_sent() -> None:
    params = GenerationParams(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, stop_token_ids=(2,)
    )
    ASKED.clear()
    completion = run_fake(complete(), lambda engine: generate(engine, (1, 2, 3), params))
    assert completion == Completion(token_ids=(7, 8), logprobs=(-0.5, -1.5), finish_reason="stop")
    assert ASKED == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "add_special_tokens": False,
            "max_tokens": 5,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [2],
            "stop": [],
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": "absent"}, "its answer has no token_ids"),
        ({"token_ids": ["7", "8"]}, "its answer has no token_ids"),
        ({"prompt_token_ids": [1, 2]}, "was given 3 prompt ids and answers for 2 others"),
        ({"logprobs": None}, "the server's answer has no logprobs"),
        ({"token_ids": [7]}, "2 logprobs of tokens that are not the 1 sampled ones"),
        ({"token_ids": [7, 9]}, "2 logprobs of tokens that are not the 2 sampled ones"),
        ({"finish_reason": "abort"}, "ended the request with 'abort'"),
    ],
)
def test_answers_that_cannot_be_trusted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run_fake(complete(**changes), lambda engine: generate(engine, (1, 2, 3)))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (complete(token_ids="absent"), NoTokenIdsError, "gives no token ids"),
        (
            lambda body: JSONResponse({"error": {"message": "prompt must be text"}}, 400),
            NoTokenIdsError,
            "must be text",
        ),
        (lambda body: JSONResponse({"detail": "Not Found"}, 404), NoTokenIdsError, "Not Found"),
        (lambda body: JSONResponse({"error": {"message": "bad key"}}, 401), RefusedError, "bad key"),
        (complete(prompt_token_ids=[1, 2, 4]), ConfigError, "another tokenizer"),
        (complete(), ConfigError, "--logprobs-mode processed_logprobs"),
    ],
)
def test_what_the_probe_finds(answer: Any, error: type[Exception], message: str) -> None:
    params = GenerationParams(max_tokens=5, temperature=0.7)

    def fix(body: dict[str, Any]) -> Any:
        # a text prompt is tokenised by the server; ids come back as they are
        found = answer(body)
        if isinstance(found, dict) and isinstance(body["prompt"], list) and "prompt_token_ids" in found["choices"][0]:
            found["choices"][0]["prompt_token_ids"] = body["prompt"]
        return found

    with pytest.raises(error, match=message):
        run_fake(fix, lambda engine: engine.probe("text", (1, 2, 3), params))


def test_raw_logprobs_are_those_of_temperature_one() -> None:
    run_fake(complete(), lambda engine: engine.probe("text", (1, 2, 3), GenerationParams(max_tokens=5)))


def test_a_server_that_comes_back_is_asked_again(quick: None) -> None:
    statuses = iter([503, 502])

    def answer(body: dict[str, Any]) -> Any:
        status = next(statuses, None)
        return complete()(body) if status is None else JSONResponse({"error": "starting"}, status)

    ASKED.clear()
    assert run_fake(answer, lambda engine: generate(engine, (1, 2, 3))).token_ids == (7, 8)
    assert len(ASKED) == 3


def test_a_server_that_stays_busy_sends_the_agent_back(quick: None) -> None:
    def answer(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "too many"}}, 429, {"retry-after": "0.02"})

    ASKED.clear()
    with pytest.raises(EngineBusyError, match="status 429: too many") as caught:
        run_fake(answer, lambda engine: generate(engine, (1, 2, 3)))
    assert caught.value.retry_after_s == 1.0
    assert len(ASKED) == 3


def test_a_server_that_is_gone_is_given_up(quick: None) -> None:
    server = OpenAIServer("http://127.0.0.1:9/v1")
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/v1/completions cannot be reached"):
        generate(RemoteEngine(server, model="m", max_model_len=100), (1, 2, 3))
    with pytest.raises(ConfigError, match=r"no model is served at http://127.0.0.1:9/v1: .* start the server first"):
        find_served_model(server)
    server.close()
    server.close()
    with pytest.raises(EngineError, match="was closed"):
        generate(RemoteEngine(server, model="m", max_model_len=100), (1, 2, 3))


def test_closing_fails_what_is_in_flight() -> None:
    async def never(request: Request) -> Response:
        ASKED.append(await request.json())
        await asyncio.sleep(30)
        return JSONResponse({})

    async def main(server: OpenAIServer) -> None:
        engine = RemoteEngine(server, model="m", max_model_len=100)
        task = asyncio.create_task(engine.generate((1, 2, 3), GREEDY))
        await _wait_for(lambda: len(ASKED) == 1)
        await asyncio.to_thread(server.close)
        with pytest.raises(EngineError, match="was closed"):
            await task

    ASKED.clear()
    with serve_app({"/v1/completions": never}) as url:
        asyncio.run(main(OpenAIServer(f"{url}/v1")))


@pytest.mark.parametrize(
    ("models", "name", "message"),
    [
        ([{"id": "a"}, {"id": "b"}], None, "serves a, b: name one of them"),
        ([{"id": "a"}], "c", "serves a: 'c' is not among them"),
        ([], None, "serves no model"),
        ("nothing", None, "lists no models"),
    ],
)
def test_which_model(models: Any, name: str | None, message: str) -> None:
    async def listing(request: Request) -> Response:
        return JSONResponse({"data": models})

    with serve_app({"/v1/models": listing}) as url:
        server = OpenAIServer(f"{url}/v1/")
        with pytest.raises(ConfigError, match=message):
            find_served_model(server, name)
        server.close()


def test_a_server_without_a_list_is_taken_at_the_names_word() -> None:
    with serve_app({}) as url:
        server = OpenAIServer(f"{url}/v1")
        assert find_served_model(server, "policy_model") == ServedModel(name="policy_model", max_model_len=None)
        with pytest.raises(ConfigError, match="no model is served at"):
            find_served_model(server)
        server.close()


def test_no_address() -> None:
    with pytest.raises(ConfigError, match="'localhost:8000' is no address of a server"):
        OpenAIServer("localhost:8000")
    assert math.isclose(sum(openai_server.RETRY_DELAYS_S), 15.5)
