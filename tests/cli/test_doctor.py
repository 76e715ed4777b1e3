"""`polar-trl doctor`: which agents work here, and why not."""

import json
import re
from pathlib import Path

import pytest
import yaml
from environments import IMAGE, save_image

from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.pi import PiHarness
from polar_trl.sandbox.docker import client
from polar_trl.tools.security import check
from polar_trl.tools.security.probes import PROBES

ROOT = Path(__file__).resolve().parents[2]
LADDER = str(ROOT / "polar_trl" / "configs" / "tasks" / "shell_ladder.jsonl")


def test_it_says_of_each_agent_that_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "codex", "pi", "--install", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agents"].keys() == {"codex", "pi"}
    for name, checkup in report["agents"].items():
        version = AGENTS[name].verified_version
        about = {"installed": version, "verified": version, "works": True, "why": "", "prompt_tokens": None}
        assert checkup == about


def test_what_is_not_installed_is_no_failure_unless_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count("is not") >= 1
    assert main(["doctor", "pi", "--json"]) == 1
    (checkup,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert (checkup["installed"], checkup["works"]) == (None, False)
    assert "polar-trl doctor --install pi" in checkup["why"]


def test_an_agent_that_does_not_run_the_command_is_found_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = build_agent("pi").build_shell_call("true")
    monkeypatch.setattr(PiHarness, "build_shell_call", lambda self, command: wrong)
    assert main(["doctor", "pi", "--install", "--json"]) == 1
    (checkup,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert not checkup["works"] and "the shell command of the first turn was not run" in checkup["why"]


def test_a_prompt_is_counted_by_a_models_tokenizer_and_has_to_fit_the_window(
    capsys: pytest.CaptureFixture[str], smollm2: Path
) -> None:
    model = str(smollm2)
    assert main(["doctor", "pi", "--install", "--json", "--model", model, "--window", "100000"]) == 0
    (fits,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert fits["works"] and fits["prompt_tokens"] > PiHarness.prompt_size.default
    assert main(["doctor", "pi", "--json", "--model", model, "--window", "900"]) == 1
    (small,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert small["why"] == f"its first prompt has {fits['prompt_tokens']} tokens, and the context window is 900"
    assert main(["doctor", "pi", "--json", "--model", model, "--window", "4096"]) == 1
    (refused,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert "4096" in refused["why"] and "8192" in refused["why"]  # as a run does, before it begins
    assert main(["doctor", "pi", "--model", model]) == 0
    assert f"{fits['prompt_tokens']} tokens" in " ".join(capsys.readouterr().out.split())


def test_a_run_files_agent_is_tried_with_its_options_its_model_and_its_window(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2: Path
) -> None:
    run = yaml.safe_load((ROOT / "polar_trl" / "configs" / "ladder_pi.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run | {"model_name_or_path": str(smollm2)}))
    assert main(["doctor", "--config", str(path), "--json"]) == 0
    (fits,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert fits["works"] and 700 < fits["prompt_tokens"] < 900
    assert main(["doctor", "--config", str(path), "--json", "--window", "500"]) == 1
    assert f"has {fits['prompt_tokens']} tokens, and the context window is 500" in capsys.readouterr().out
    own = f"python3 -I -S {ROOT}/polar_trl/configs/agents/shell_agent.py --max-turns 2 -- {{instruction}}"
    folders = [str(ROOT / "polar_trl" / "configs" / "agents")]
    path.write_text(yaml.safe_dump({"agent_command": own, "agent_folders": folders}))
    assert main(["doctor", "--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agents"][own]["works"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pi", "--config", "ladder_pi"], "--config names the agent"),
        (["--config", "nowhere"], "no file at 'nowhere', and no run file of that name"),
        (["--config", str(Path(__file__))], "test_doctor.py is no YAML"),
        (
            ["--config", str(ROOT / "polar_trl" / "configs" / "accelerate" / "ddp_8gpu.yaml")],
            "is no run file: it names no agent",
        ),
    ],
)
def test_a_run_file_that_is_none_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(("window", "status"), [("[8192]", 2), ("soon", 2), ("'900'", 1)])
def test_a_window_of_a_run_file_is_read_as_a_run_reads_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2: Path, window: str, status: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"agent: pi\nmodel_name_or_path: {smollm2}\nvllm_max_model_length: {window}\n")
    assert main(["doctor", "--config", str(path), "--json"]) == status
    said = capsys.readouterr()
    if status == 1:
        assert "the context window is 900" in said.out
    else:
        assert "vllm_max_model_length is" in said.err and "give a whole number" in said.err


@pytest.mark.parametrize("arguments", [["--window", "9"], ["--window", "0", "--model", "x"], ["--model", "/nowhere"]])
def test_a_window_needs_a_model_that_is_there(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["doctor", "pi", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_an_odd_answer_time_is_one_sentence(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert main(["doctor", "pi", "--answer_s", seconds]) == 2
    assert "--answer_s must be a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("codex", {"images": "yes"}, "images must be true or false"),
        ("codex", {"version": "../../x"}, "version must be an exact version"),
        ("claude_code", {"max_turns": "a"}, "max_turns must be a whole number"),
        ("mini_swe_agent", {"step_limit": "x"}, "step_limit must be a whole number"),
        ("pi", {"api": "smoke"}, "api must be one of"),
        ("pi", {"nosuch": 1}, "agent 'pi' has no option 'nosuch'; it has api, images, system_prompt, tools"),
    ],
)
def test_odd_options_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_agent(name, options)


def test_another_version_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "pi@1.5.2", "pi@1.5.999", "--install", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)["agents"]
    assert report["pi@1.5.2"].items() >= {"installed": "1.5.2", "works": True, "why": ""}.items()
    assert report["pi@1.5.2"]["verified"] == PiHarness.verified_version
    assert report["pi@1.5.999"]["why"] == "@earendil-works/pi-coding-agent: the registry has no version 1.5.999"


def test_a_version_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path))
    assert main(["doctor", "codex@0.170.0", "--json"]) == 1
    (checkup,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert checkup["why"] == "codex@0.170.0 is not installed; run: polar-trl doctor --install codex@0.170.0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pi@"], "version must be an exact version such as 1.2.3, not ''"),
        (["pi@latest"], "version must be an exact version such as 1.2.3, not 'latest'"),
        (["vim@1.0.0"], "agent 'vim@1.0.0' is not known"),
        (["agent {instructions}"], "did you mean {instruction}?"),
        (["agent {instruction}", "--agent_folders", "no/such/folder"], "no/such/folder is no folder"),
        (["agent {instruction}", "--agent_files", "no/such/file"], "agent_files: no/such/file cannot be read"),
        (["agent {instruction}", "--agent_options", "{"], "agent_options is not JSON"),
        (["agent {instruction}", "--model", "no/such/model"], "no/such/model"),
        (["agent {instruction}", "--tasks", "no/such/tasks.jsonl"], "no task file at no/such/tasks.jsonl"),
        (["agent {instruction}", "--tasks", LADDER], "--tasks gives the image for --sandbox docker or bwrap"),
    ],
)
def test_a_wrong_question_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said.splitlines()[-1]


def test_an_own_agent_is_described(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, smollm2: Path
) -> None:
    command = f"python3 -I -S {ROOT}/polar_trl/configs/agents/shell_agent.py --max-turns 2 -- {{instruction}}"
    words = [
        command,
        "no-such-agent {instruction}",
        "--agent_folders",
        str(ROOT / "polar_trl" / "configs" / "agents"),
        "--model",
        str(smollm2),
    ]
    assert main(["doctor", *words]) == 1
    out, err = capsys.readouterr()
    out, ways = out.split("where agents can run here:\n")
    assert re.findall(r"^  ([\w ]+): (yes|no)", ways, re.MULTILINE)[1:] == [
        ("bwrap", "yes"),
        ("bwrap with images", "yes"),
        ("local", "yes"),
    ]
    good, bad = out.split("no-such-agent {instruction}\n")
    assert "works: yes" in good and "speaks: openai_chat (1 calls); 0 streamed, 0 auxiliary" in good
    assert re.search(r"prompts: (\d\d) first, \1 longest \(tokens\)", good)
    assert "tools: none" in good and "ran a command in a code block" in good
    assert re.fullmatch(
        r"  works: no: the agent ended with exit code 127 before its first call: .*no-such-agent: command not found\n",
        bad,
    )
    assert "command not found" not in err and not caplog.records  # said once
    assert main(["doctor", *words[:1], "--agent_folders", str(ROOT / "polar_trl" / "configs" / "agents")]) == 0
    assert "(bytes; --model counts tokens)" in capsys.readouterr().out


def test_an_unknown_agent_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "codx"]) == 2
    assert "agent 'codx' is not known; known are claude_code, codex" in capsys.readouterr().err


def test_security_says_what_each_sandbox_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--security", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["default"] == "bwrap"
    rows = {kind: [row for row in report["rows"] if row["backend"] == kind] for kind in ("bwrap", "local")}
    for row in rows["bwrap"]:
        assert row == {"name": row["name"], "backend": "bwrap", "held": True, "detail": "", "advice": ""}
    names = [[row["name"] for row in rows[kind]] for kind in rows]
    assert names[0] == names[1] and len(set(names[0])) == len(names[0]) == 21
    assert {row["name"] for row in rows["local"] if not row["held"]} > {"network", "memory hog", "fork bomb"}


@pytest.mark.containers
def test_security_in_containers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--security", "--sandbox", "docker", "--image", "polar-trl-test:latest", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    # engines before 25 let io_uring and vsock through
    assert {row["name"] for row in rows if not row["held"]} <= {"io_uring and rare sockets"} and len(rows) == 21


def test_security_of_a_sandbox_that_does_not_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PROBES", [probe for probe in PROBES if probe.attack in ("mounts", "network")])
    assert main(["doctor", "--security", "--sandbox", "local"]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 attacks held" in said and "use `--sandbox bwrap`" in said


def test_security_without_a_sandbox_that_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["doctor", "--security", "--sandbox", "bwrap"]) == 1
    assert "bwrap: not tried: the bubblewrap sandbox needs `bwrap`" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["codex"], ["--config", "small/pi"]])
def test_security_tries_no_agents(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["doctor", *words, "--security"]) == 2
    assert "leave out the agents" in capsys.readouterr().err


@pytest.mark.containers
def test_in_an_unpacked_image(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = save_image(IMAGE, tmp_path)
    assert main(["doctor", "pi", "--install", "--sandbox", "bwrap", "--sandbox_image", archive, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agents"]["pi"]["works"] and report["sandboxes"]["bwrap with images"] == "yes"
    # without an engine, the image is bubblewrap's
    monkeypatch.setenv("DOCKER_HOST", "")
    monkeypatch.setattr(client, "SOCKETS", ())
    code = main(["doctor", "--security", "--image", archive, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report
    assert report["default"] == "bwrap" and "no container engine" in report["not_tried"]["docker"]
