"""Test the comparison without its peers: our own side, the judge with wrong builders, the stand-in engines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import bench_peers
import pytest
from bench_peers import count_rows, measure_cost, measure_rows, start_load
from peers import servers
from peers.engine import ConstantServer, PolicyServer
from peers.policy import Policy, encode_constant_reply, load_tokenizer, save_tokenizer
from peers.servers import PEERS, Peer
from peers.sessions import KINDS, TOOLS, Row, Sample, judge, play_session
from tiny_tokenizers import CHATML, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny tokenizer with Qwen3's chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(CHATML).save_pretrained(folder / "base")
    save_tokenizer(folder / "base", folder / "qwen3")
    return str(folder / "qwen3")


def test_each_sample_of_our_own_side_is_trained_once(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "TURNS", (6,))
    totals = count_rows(PEERS["polar_trl"], tokenizer, "vllm")
    assert list(totals) == list(KINDS)
    for kind, counts in totals.items():
        assert counts["once"] == counts["sampled"] > 100, kind
        assert [counts[name] for name in ("twice", "lost", "drift", "never")] == [0, 0, 0, 0], kind
    rows = {kind: counts["rows"] for kind, counts in totals.items() if counts["rows"] != 1}
    assert rows == {"sub-agent": 2, "compaction": 2}


def sample_session(tokenizer: str, kind: str, parser: str = "vllm") -> list[Sample]:
    """Play a session against the engine alone."""
    policy = Policy(load_tokenizer(tokenizer))
    policy.begin(kind, 6)
    server = PolicyServer(policy)

    def post(messages: list[dict[str, Any]], _: Any) -> dict[str, Any]:
        answer = server.answer(f"/{parser}/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert answer["choices"][0]["token_ids"] == policy.samples[-1].token_ids
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    play_session(kind, 6, post)
    return policy.samples


def build_row_per_call(samples: Sequence[Sample]) -> list[Row]:
    return [
        Row(
            [*sample.prompt_ids, *sample.token_ids],
            [False] * len(sample.prompt_ids) + [True] * len(sample.token_ids),
            [0.0] * len(sample.prompt_ids) + list(sample.logprobs),
        )
        for sample in samples
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_per_call_trains_each_sample_once(tokenizer: str, kind: str) -> None:
    samples = sample_session(tokenizer, kind)
    counts = judge(samples, build_row_per_call(samples))
    assert counts["rows"] == counts["calls"] == len(samples)
    assert counts["once"] == counts["sampled"]
    assert [counts[name] for name in ("twice", "lost", "drift", "never")] == [0, 0, 0, 0]


def change_context(rows: list[Row]) -> list[Row]:
    first = rows[0]
    return [replace(first, token_ids=[first.token_ids[0] + 1, *first.token_ids[1:]]), *rows[1:]]


def train_context(rows: list[Row]) -> list[Row]:
    return [replace(rows[0], trained=[True, *rows[0].trained[1:]]), *rows[1:]]


def swap_sampled_id(rows: list[Row]) -> list[Row]:
    return [replace(rows[0], token_ids=[*rows[0].token_ids[:-1], rows[0].token_ids[-1] + 1]), *rows[1:]]


@pytest.mark.parametrize(
    ("build", "wrong"),
    [
        (lambda rows: rows[1:], {"lost": "all"}),
        (lambda rows: [*rows, rows[0]], {"twice": "all"}),
        (change_context, {"drift": "all"}),
        (train_context, {"never": 1}),
        (swap_sampled_id, {"never": 1, "lost": 1}),
    ],
)
def test_the_judge_finds_what_a_wrong_builder_does(
    tokenizer: str, build: Callable[[list[Row]], list[Row]], wrong: dict[str, Any]
) -> None:
    samples = sample_session(tokenizer, "linear tools")
    counts = judge(samples, build(build_row_per_call(samples)))
    expected = {name: len(samples[0].token_ids) if count == "all" else count for name, count in wrong.items()}
    assert {name: counts[name] for name in ("twice", "lost", "drift", "never") if counts[name]} == expected
    assert counts["once"] + counts["twice"] + counts["lost"] == counts["sampled"]


def test_a_merged_row_over_retokenised_history_has_drifted(tokenizer: str) -> None:
    """The last prompt with every sample laid over it: what a builder does that looks only at lengths and text."""
    samples = sample_session(tokenizer, "linear tools", "vllm")
    last = samples[-1]
    counts = judge(samples, build_row_per_call([last]))
    assert counts["drift"] == 0 and counts["lost"] == counts["sampled"] - len(last.token_ids)
    first, second = samples[:2]
    start = len(first.prompt_ids) + len(first.token_ids)
    # vLLM's parser leaves a newline in the content that the template writes too: the second prompt has another history
    assert list(second.prompt_ids[:start]) != [*first.prompt_ids, *first.token_ids]
    merged = Row(
        [*first.prompt_ids, *first.token_ids, *second.prompt_ids[start:], *second.token_ids],
        [False] * len(first.prompt_ids)
        + [True] * len(first.token_ids)
        + [False] * (len(second.prompt_ids) - start)
        + [True] * len(second.token_ids),
        [0.0] * len(first.prompt_ids)
        + list(first.logprobs)
        + [0.0] * (len(second.prompt_ids) - start)
        + list(second.logprobs),
    )
    assert judge([first, second], [merged])["drift"] == len(second.token_ids)


def test_the_judge_raises_where_it_cannot_judge() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens have 1 different"):
        judge([Sample([1], [2, 3], [-0.5, -0.5])], [])
    with pytest.raises(ValueError, match="a row of 2 ids, 1 marks, 2 logprobs"):
        judge([], [Row([1, 2], [True], [0.0, -0.5])])


def test_a_peer_that_does_not_install_has_its_reason_in_its_row(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "FOLDER", tmp_path)
    monkeypatch.setitem(PEERS, "openenv", Peer("openenv", ("openenv==0.0.0",)))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    results = [*measure_rows(["openenv"], tokenizer), *measure_cost(["openenv"], tokenizer, 1)]
    assert results and all("openenv==0.0.0" in result["not_run"] for result in results)
    assert "| openenv | not run: does not install: " in capsys.readouterr().out


def test_the_prompts_of_the_constant_engine_go_on(tokenizer: str) -> None:
    reply_ids = encode_constant_reply(load_tokenizer(tokenizer))
    server = ConstantServer(reply_ids)
    connection = HTTPConnection(server.origin.removeprefix("http://"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 400}]
    ids: list[int] = []
    for _ in range(3):
        body = json.dumps({"return_token_ids": True, "messages": messages})
        connection.request("POST", "/v1/chat/completions", body)
        answer = json.loads(connection.getresponse().read())
        assert answer["prompt_token_ids"][: len(ids)] == ids
        assert len(answer["prompt_token_ids"]) == pytest.approx(len(body) / 4, rel=0.5)
        ids = answer["prompt_token_ids"] + reply_ids
        messages += [answer["choices"][0]["message"], {"role": "tool", "content": "y" * 400}]


def test_agents_measure_the_turns_that_they_are_told_to(tokenizer: str) -> None:
    server = ConstantServer(encode_constant_reply(load_tokenizer(tokenizer)))
    job = {"turns": 4, "new_bytes": 50, "measured": 3, "origin": server.origin, "threads": [["a", "b"], ["c"]]}
    with start_load() as load:
        for _ in range(2):
            seconds, wall_s, cpu_ms = load.run(None, job)
            assert len(seconds) == 9 and wall_s > 0 and cpu_ms == 0
