"""`polar-trl lint-template`: what chat templates do to sampled turns, on real templates and on some made bad."""

import dataclasses
import importlib.util
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from launch import find_warm_python
from tiny_qwen import build_tiny_qwen3, build_tiny_qwen35
from transformers import AutoTokenizer

from polar_trl.cli import main
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.reconstruct import build_prefix_merged
from polar_trl.recording.log import SessionLog, read_record
from polar_trl.tokens.load import load_renderer
from polar_trl.tools.lint_template import lint, load_model
from polar_trl.types import Rollout

CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ ARGUMENTS }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with tools, to be made bad in one place at a time."""


@pytest.fixture(scope="module")
def qwen3(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def qwen35(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen35(smollm2, tmp_path_factory.mktemp("qwen35") / "model")


def build_folder(smollm2: Path, folder: Path, template: str, plain: Sequence[str] = ()) -> Path:
    """SmolLM2's vocabulary under another chat template, whose marks become tokens."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    marks = sorted(set(re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>", template)))
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens([token for token in plain if token in template])
    tokenizer.unk_token = None  # here "<|endoftext|>", which some families know as a token of its own
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def read_trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and the JSON report."""
    status = main(["lint-template", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def kinds(report: dict[str, Any], name: str) -> list[tuple[list[str], int]]:
    """The kinds of each rewriting of the turn with this name, and the call at which it begins."""
    turn = next(turn for turn in report["turns"] if turn["name"] == name)
    return [(rewrite["kinds"], rewrite["call"]) for rewrite in turn["rewrites"]]


def differing(report: dict[str, Any], name: str, number: int = 0) -> tuple[str, str]:
    """Both sides of a shown difference, as text."""
    turn = next(turn for turn in report["turns"] if turn["name"] == name)
    pairs = [pair for pair in turn["rewrites"][number]["pairs"] if pair["sampled"] != pair["written"]]
    sides = (("sampled", "written"), pairs)
    sampled, written = ("".join(pair[side][1] for pair in sides[1] if pair[side]) for side in sides[0])
    return sampled, written


def test_smollm2_is_continued_exactly(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, smollm2)
    assert (status, report["exact"], report["renderer"]) == (0, True, "template")
    assert [p["trajectories"] for p in report["policies"].values()] == [2, 2]
    assert any("described in the system message" in limit for limit in report["limits"])
    # its template rewrites nothing; line breaks that a model samples after the opening's are other tokens, though
    assert {turn["name"]: turn["rewrites"] for turn in report["turns"] if turn["rewrites"]}.keys() == {
        "whitespace around the text"
    }
    assert kinds(report, "whitespace around the text") == [(["tokens"], 5)]
    sampled, written = differing(report, "whitespace around the text")
    assert sampled == written


def test_qwen3_drops_reasoning_once_a_user_message_follows(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, qwen3)
    assert (status, report["renderer"], report["policy"]) == (0, "qwen3", "keep")
    assert any("writes what the tokenizer's chat template writes" in why for why in report["why"])
    first = report["turns"][0]
    # two tool results leave it alone (calls 1 and 2), the user message of call 3 does not
    assert [(r["kinds"], r["call"], r["drops_reasoning"]) for r in first["rewrites"]] == [(["reasoning"], 3, True)]
    assert first["rewrites"][0]["since"] == "once a user message follows"
    assert differing(report, first["name"]) == ("<think>\nThe notes may say why.\n</think>\n\n", "")
    assert first["forks_at"] == {"keep": None, "template": 3}
    assert report["policies"]["keep"] | {"refusal": None} == {
        "trajectories": 2, "conversations": 2, "forks": 0, "refusal": None, "exact": True,
    }  # fmt: skip
    assert report["policies"]["template"]["trajectories"] == 8


def test_the_policy_decides(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, qwen3, "--thinking", "template")
    assert (status, report["exact"]) == (1, False)
    assert "6 calls are rendered anew" in report["verdict"]
    assert "8 trajectories instead of 2" in report["verdict"]


def test_qwen35_writes_arguments_anew(qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, qwen35)
    assert (status, report["renderer"]) == (0, "qwen3.5")
    assert kinds(report, "reasoning, then text") == [(["reasoning"], 3)]
    (found, since), *_ = kinds(report, "unusual JSON arguments")
    assert since == 2 and "arguments" in found
    sampled, written = differing(report, "unusual JSON arguments")
    assert sampled.endswith("true") and written.endswith("True")  # Jinja's word for it
    assert '","' in sampled and '", "' in written


def test_without_thinking_qwen35_opens_with_empty_reasoning(qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, qwen35, "--chat_template_kwargs", '{"enable_thinking": false}')
    assert status == 0
    found = kinds(report, "text only")
    assert found == [(["reasoning"], 9)]
    assert differing(report, "text only") == ("<think>\n\n</think>\n\n", "")
    assert not report["turns"][7]["rewrites"][0]["drops_reasoning"]


@pytest.mark.parametrize(
    ("content", "arguments", "name", "expected"),
    [
        ("m.content", "c.function.arguments | tojson", "unusual JSON arguments", ["arguments"]),
        ("m.content", "dict(c.function.arguments | dictsort) | tojson", "unusual JSON arguments", ["arguments"]),
        ("m.content | trim", "c.function.arguments | tojson", "whitespace around the text", ["whitespace"]),
    ],
)
def test_a_template_made_bad(
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    arguments: str,
    name: str,
    expected: list[str],
) -> None:
    template = CHATML_TOOLS.replace("CONTENT", content).replace("ARGUMENTS", arguments)
    status, report = ask(capsys, build_folder(smollm2, tmp_path, template))
    assert report["limits"] == [] or "trims" in report["limits"][0]
    trims = "trim" in content
    assert (status, report["exact"]) == (int(trims), not trims)
    assert kinds(report, name)[0][0] == expected
    sampled, written = differing(report, name)
    assert sampled != written
    if "dictsort" in arguments:
        assert sampled.startswith('timeout_s":1.0, "')  # no longer the first key
        assert r"\u00ef" in sampled and "ï" in written
    if trims:
        turn = next(turn for turn in report["turns"] if turn["name"] == name)
        assert turn["forks_at"] == {"keep": 5, "template": 5}
        assert report["policies"]["keep"]["trajectories"] == 3


def test_a_template_that_moves_what_others_said(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = CHATML_TOOLS.replace("CONTENT", "m.content").replace("ARGUMENTS", "c.function.arguments | tojson")
    counting = template.replace("{% for m in messages %}", "{{ messages | length }} messages\n{% for m in messages %}")
    status, report = ask(capsys, build_folder(smollm2, tmp_path, counting))
    assert status == 1
    assert "no reply can be continued" in report["verdict"]
    change = report["context_changes"][0]
    assert "2 messages" in change["before"] and "4 messages" in change["after"]
    assert report["policies"]["keep"]["trajectories"] == 11


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("CONTENT", "m.content | upper", "the template does not write text as it was sampled"),
        ("{% for m in", "{{ strftime_now('%f') }}{% for m in", "two renderings of the same conversation differ"),
    ],
)
def test_why_no_reply_can_be_continued(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, reason: str
) -> None:
    template = CHATML_TOOLS.replace(old, new).replace("CONTENT", "m.content")
    folder = build_folder(smollm2, tmp_path, template.replace("ARGUMENTS", "c.function.arguments | tojson"))
    status, report = ask(capsys, folder)
    assert (status, report["verdict"]) == (
        1,
        f"no: no reply can be continued, every call is rendered anew ({reason})",
    )
    assert not any("anew" in limit for limit in report["limits"])
    for turn in report["turns"]:
        assert turn["num_tokens"] > 1
        assert (turn["forks_at"]["keep"] is not None) == turn["is_followed"]
        assert [r["kinds"] for r in turn["rewrites"]] == [["not found"]] * turn["is_followed"]
    found = report["policies"]["keep"]
    assert (found["conversations"], found["forks"], found["trajectories"]) == (2, 9, 11)


def test_what_goes_without_saying_is_not_said(smollm2: Path, tmp_path: Path) -> None:
    template = CHATML_TOOLS.replace("CONTENT", "m.content | upper").replace("ARGUMENTS", "0")
    for model in (smollm2, build_folder(smollm2, tmp_path / "upper", template)):
        command = [find_warm_python(), "-m", "polar_trl", "lint-template", str(model)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert " ".join(done.stdout.split()).count("own chat template") == 1
        assert "llama-3" not in done.stdout
        assert "chat template:" not in done.stderr


def test_trls_own_templates(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known properties of these families are found by writing only."""
    think = (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    folders = {
        name: build_folder(smollm2, tmp_path / name, read_trl_template(name), think)
        for name in ("llama3", "gptoss", "glm4moe", "qwen2_5", "phi3")
    }
    # Llama 3 trims what was said
    status, report = ask(capsys, folders["llama3"])
    assert status == 1
    assert kinds(report, "whitespace around the text") == [(["whitespace"], 5)]
    # gpt-oss keeps no channel marks in content: its own template cannot carry what its model says
    status, report = ask(capsys, folders["gptoss"])
    assert status == 1
    assert "<|channel|>" in report["policies"]["keep"]["refusal"]
    assert report["verdict"].startswith("no: the template refuses")
    # GLM ends no turn with a token of its own
    status, report = ask(capsys, folders["glm4moe"])
    assert status == 1
    assert report["refusal"] == "the template does not write a reply as it is, with a special token after it"
    # Qwen2.5 writes arguments anew, and Phi-3 takes all as it is
    status, report = ask(capsys, folders["qwen2_5"])
    assert (status, kinds(report, "unusual JSON arguments")) == (0, [(["arguments"], 2)])
    status, report = ask(capsys, folders["phi3"])
    assert (status, kinds(report, "unusual JSON arguments")) == (0, [])


def test_a_family_by_hand(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = read_trl_template("glm4moe")
    plain = [f"<{close}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for close in ("", "/")]
    folder = build_folder(smollm2, tmp_path, f"{template}{{# <tool_response> </tool_response> /nothink #}}", [
        *plain, "<tool_response>", "</tool_response>", "/nothink",
    ])  # fmt: skip
    status, report = ask(capsys, folder, "--renderer", "glm-4.5")
    assert (status, report["renderer"], report["why"]) == (0, "glm-4.5", ["glm-4.5, as asked"])
    assert kinds(report, "reasoning, then text") == [(["reasoning"], 3)]
    assert kinds(report, "whitespace around the text") == [(["reasoning", "whitespace"], 5)]
    assert report["policies"]["template"]["trajectories"] == 5


def record_session(model: Path, path: Path) -> Rollout:
    """An agent of three calls and a user's follow-up, through the real proxy with scripted replies."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = load_renderer(tokenizer, str(model))
    call = "<tool_call>\n<function=run>\n<parameter=quiet>\ntrue\n</parameter>\n</function>\n</tool_call>"
    replies = [
        f"I should look.\n</think>\n\n{call}<|im_end|>",
        "That is all.\n</think>\n\n It is done.<|im_end|>",
        "Sure?\n</think>\n\nYes.<|im_end|>",
    ]
    engine = ScriptedEngine([tokenizer.encode(reply, add_special_tokens=False) for reply in replies])
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "run",
                "parameters": {"type": "object", "properties": {"quiet": {"type": "boolean"}}},
            },
        }
    ]
    log = SessionLog(session_id=path.stem, task_id="t", group_id="g", path=path)
    with Proxy(engine, renderer, params=GenerationParams(max_tokens=200)) as proxy:
        endpoint = proxy.open_session(log)
        client = openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "Do it."}]
        for _ in replies:
            reply = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "ok"})
            else:
                messages.append({"role": "user", "content": "Are you sure?"})
        rollout = Rollout(id=path.stem, task_id="t", group_id="g", calls=log.calls, reward=1.0)
        log.close(rollout)
    return rollout


def test_the_real_command_on_a_recorded_session(qwen35: Path, tmp_path: Path) -> None:
    path = tmp_path / "sessions" / "a.jsonl"
    rollout = record_session(qwen35, path)
    command = [find_warm_python(), "-m", "polar_trl", "lint-template", str(qwen35), "--session", str(path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["source"], report["exact"], report["notes"]) == (str(path), True, [])
    assert [turn["name"] for turn in report["turns"]] == [
        "reasoning, call of run",
        "reasoning, text",
        "reasoning, text",
    ]
    first, second, last = report["turns"]
    assert [(r["kinds"], r["call"]) for r in first["rewrites"]] == [
        (["arguments"], 1),
        (["reasoning", "arguments"], 2),
    ]
    # the space before its text goes with the reasoning
    assert [(r["kinds"], r["call"]) for r in second["rewrites"]] == [(["reasoning", "whitespace"], 2)]
    assert last["rewrites"] == [] and not last["is_followed"]
    # what keeping means is what was recorded and trained
    trained = build_prefix_merged(read_record(path).rollout).trajectories
    assert report["policies"]["keep"]["trajectories"] == len(trained) == 1
    assert len(trained[0].call_indices) == len(rollout.calls) == 3
    assert report["policies"]["template"]["trajectories"] == 2

    shown = subprocess.run([*command, "--thinking", "template"], capture_output=True, text=True, timeout=600)
    assert shown.returncode == 1
    text = " ".join(shown.stdout.split())
    assert "reasoning dropped" in text and "'true'" in text and "'True'" in text
    assert "1 call is rendered anew" in text


def test_a_session_of_another_tokenizer_is_refused(qwen35: Path, smollm2: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.jsonl"
    record_session(qwen35, path)
    assert main(["lint-template", str(smollm2), "--session", str(path)]) == 2
    assert "do not read as recorded with the tokenizer of" in capsys.readouterr().err


def test_a_session_of_other_settings_is_said(qwen35: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.jsonl"
    record_session(qwen35, path)
    _, report = ask(capsys, qwen35, "--session", path, "--chat_template_kwargs", '{"enable_thinking": false}')
    assert any("is not what is written here" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{tmp}/nothing"], "no tokenizer at"),
        (["{model}", "--session", "{tmp}/none.jsonl"], "no such file"),
        (["{model}", "--session", "{tmp}/broken.jsonl"], "line 1"),
        (["{model}", "--session", "{tmp}/empty.jsonl"], "no call of this session has sampled token ids"),
        (["{model}", "--renderer", "qwen9"], "no model family 'qwen9'"),
        (["{model}", "--chat_template_kwargs", "{{"], "is not JSON"),
        (["{model}", "--chat_template_kwargs", "[1]"], "must be a JSON object"),
        (["{tmp}/untemplated"], "has no chat template"),
        (["{tmp}/raising"], "cannot be used"),
        (["{tmp}/empty"], "writes the same whatever the user says"),
    ],
)
def test_bad_input(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"type": "call"}\n')
    SessionLog(session_id="empty", task_id="t", group_id="g", path=tmp_path / "empty.jsonl").close(
        Rollout(id="empty", task_id="t", group_id="g")
    )
    build_folder(smollm2, tmp_path / "raising", "{{ raise_exception('never') }}")
    build_folder(smollm2, tmp_path / "empty", "{# nothing #}")
    bare = build_folder(smollm2, tmp_path / "untemplated", "x")
    (bare / "chat_template.jinja").unlink()
    filled = [argument.format(tmp=tmp_path, model=smollm2) for argument in arguments]
    assert main(["lint-template", *filled]) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err
    assert len(err.strip().splitlines()[-1]) < 500


def test_the_terminal_shows_each_kind_once(qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint-template", str(qwen35)]) == 0
    out = capsys.readouterr().out
    assert out.count("reasoning dropped, once a user") == 1
    assert "Can it be continued exactly with thinking=keep? yes" in out
    assert "'<think>'" in out and "\x1b[" not in out


def test_from_python(qwen35: Path) -> None:
    report = lint(load_model(str(qwen35)))
    assert report.is_exact
    assert [turn.call for turn in report.turns if not turn.is_followed] == [9, 10]


def test_a_bare_tool_call_of_another_tokenizer_is_refused(
    qwen35: Path, smollm2: Path, tmp_path: Path, capsys: Any
) -> None:
    recorded = tmp_path / "a.jsonl"
    record_session(qwen35, recorded)
    calls = [
        dataclasses.replace(call, message=dataclasses.replace(call.message, text=""), parent=None)
        for call in read_record(recorded).rollout.calls
        if call.message.tool_calls
    ]
    log = SessionLog(session_id=calls[0].session_id, task_id="t", group_id="g", path=tmp_path / "b.jsonl")
    for index, call in enumerate(calls):
        log.append(dataclasses.replace(call, index=index))
    assert main(["lint-template", str(smollm2), "--session", str(tmp_path / "b.jsonl")]) == 2
    assert "do not read as recorded with the tokenizer of" in capsys.readouterr().err
