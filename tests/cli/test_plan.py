"""`polar-trl plan`: what it prints, says and refuses, on configurations without weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.tools.memory_plan import plan as planning
from polar_trl.tools.memory_plan.plan import read_accelerate

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "polar_trl" / "configs" / "pi_1gpu.yaml")


@pytest.fixture(scope="module")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a model of Qwen3-4B's size, and nothing else."""
    folder = tmp_path_factory.mktemp("qwen3-4b")
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=2560, intermediate_size=9728,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40960,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def plan(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_lora_run_fits_on_80_gb(capsys: pytest.CaptureFixture[str], qwen3_4b: str) -> None:
    report = plan(capsys, 0, "--config", RUN, "--gpu", "80GB", "--model_name_or_path", qwen3_4b)
    assert report["fits"] and report["advice"] == []
    assert list(report["phases"]) == ["load", "weight sync", "rollouts", "training", "save"]
    for parts in report["phases"].values():
        assert parts.pop("total") == sum(parts.values()) < report["gpu_bytes"]
    # TRL's float32 base and float32 adapters: 4,022,468,096 and 66,060,288 parameters
    assert report["phases"]["rollouts"]["trainer: weights"] == 4 * (4_022_468_096 + 66_060_288)
    assert report["phases"]["training"]["trainer: optimizer"] == 8 * 66_060_288
    assert "engine: weights" not in report["phases"]["training"]
    assert report["kv_sessions"] == report["kv_tokens"] // 32768 == 6


@pytest.mark.parametrize(
    ("flags", "engine_bytes", "low_bytes"),
    [((), 2, 2), (("--bf16", "false"), 4, 0), (("--bf16", "false", "--engine_dtype", "bfloat16"), 2, 2)],
)
def test_the_engine_computes_as_the_pass_does(
    capsys: pytest.CaptureFixture[str], qwen3_4b: str, flags: tuple[str, ...], engine_bytes: int, low_bytes: int
) -> None:
    keys = ("--config", RUN, "--gpu", "200GB", "--model_name_or_path", qwen3_4b, "--use_peft", "false", *flags)
    rollouts = plan(capsys, 0, *keys)["phases"]["rollouts"]
    assert rollouts["engine: weights"] == engine_bytes * 4_022_468_096
    assert rollouts.get("trainer: low halves of the masters", 0) == low_bytes * 4_022_468_096


def test_layers_are_checkpointed_as_the_card_needs(capsys: pytest.CaptureFixture[str], qwen3_4b: str) -> None:
    keys = ("--config", RUN, "--model_name_or_path", qwen3_4b, "--use_liger_kernel", "true")
    small, large = (plan(capsys, 0, *keys, "--gpu", size) for size in ("80GB", "141GB"))
    assert 36 == small["num_layers"] > small["checkpointed_layers"] > large["checkpointed_layers"] > 0
    for report in (small, large):
        # one layer less would not have fitted
        training = report["phases"]["training"]["total"]
        per_layer = report["phases"]["training"]["saved activations"] / (36 - report["checkpointed_layers"])
        assert 0.95 * report["gpu_bytes"] - per_layer < training <= 0.95 * report["gpu_bytes"]
    by_hand = plan(capsys, 0, *keys, "--gpu", "80GB", "--checkpointed_layers", "36")
    assert by_hand["checkpointed_layers"] == 36
    assert by_hand["phases"]["training"]["total"] < small["phases"]["training"]["total"]


def test_hours_are_steps_times_sampling_and_training(capsys: pytest.CaptureFixture[str], qwen3_4b: str) -> None:
    keys = ("--config", RUN, "--gpu", "80GB", "--model_name_or_path", qwen3_4b, "--checkpointed_layers", "36")
    half, short = (plan(capsys, 0, *keys, *more)["hours"] for more in ((), ("--session_tokens", "4096")))
    assert (half["num_steps"], half["sessions"], half["session_tokens"]) == (200, 32, 16384)
    assert half["hours"] == pytest.approx(200 * half["step_s"] / 3600)
    assert half["step_s"] == pytest.approx((half["rollouts_s"] + half["training_s"]) / 0.97)
    # 12 sessions at once are in the cache, 4.02 billion weights: 32 x 16,384 x 30% at about 1,430 tokens a second
    assert half["rollouts_s"] == pytest.approx(110, rel=0.05)
    # Qwen3-4B with every layer computed again took 1.31 s for 16,384 tokens in rows of 5,000 (train_cost_plan.json)
    assert short["training_s"] == pytest.approx(32 * 4096 / 12_500, rel=0.1)
    assert half["training_s"] > 4 * short["training_s"]
    endless = plan(capsys, 0, *keys, "--max_steps", "-1")["hours"]
    assert endless["hours"] is endless["num_steps"] is None


@pytest.mark.parametrize("tokens", ["0", "32769"])
def test_sessions_of_no_length_are_refused(qwen3_4b: str, tokens: str) -> None:
    setup, args = planning.read_run(Path(RUN), ["--model_name_or_path", qwen3_4b], gpu="80GB")
    found = planning.plan(setup)
    with pytest.raises(ConfigError, match=f"--session_tokens is {tokens}; it must be from 1 to 32768"):
        planning.estimate(setup, args, found, session_tokens=int(tokens))


def test_what_to_change_when_it_does_not(capsys: pytest.CaptureFixture[str], qwen3_4b: str) -> None:
    keys = ("--config", RUN, "--gpu", "80GB", "--model_name_or_path", qwen3_4b, "--use_peft", "false")
    report = plan(capsys, 1, *keys)
    assert not report["fits"]
    (helps,) = (item for item in report["advice"] if item["change"] == "optim: adamw_8bit")
    assert helps["fits"]
    # the advice is what following it gives
    changed = plan(capsys, 0, *keys, "--optim", "adamw_8bit")
    before, after = (r["phases"]["training"]["total"] for r in (report, changed))
    assert before - after == helps["saved_bytes"]


def test_the_tables_name_the_phases_and_the_answer(capsys: pytest.CaptureFixture[str], qwen3_4b: str) -> None:
    keys = ["--config", RUN, "--gpu", "80GB", "--model_name_or_path", qwen3_4b]
    assert main(["plan", *keys]) == 0
    printed = capsys.readouterr().out
    known = (
        "weight sync",
        "saved activations",
        "6 sessions of 32,768",
        "of 36 layers in the largest",
        "h for 200 steps",
    )
    for words in known:
        assert words in printed
    assert "it fits" in printed


def test_no_advice_puts_trained_weights_in_bfloat16(qwen3_4b: str) -> None:
    def list_changes(use_peft: str) -> list[str]:
        flags = ["--model_name_or_path", qwen3_4b, "--use_peft", use_peft]
        setup, _ = planning.read_run(Path(RUN), flags, gpu="80GB")
        return [change for change, _ in planning._list_variants(setup, planning.plan(setup))]

    half = 'model_init_kwargs: {"dtype": "bfloat16"}'
    assert half in list_changes("true") and half not in list_changes("false")


@pytest.mark.parametrize(
    ("is_installed", "has_gpu", "words"),
    [
        (False, False, "counted with flash-linear-attention"),
        (False, True, "counted in torch"),
        (True, True, "counted with"),
    ],
)
def test_it_says_which_kernels_were_counted(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_installed: bool,
    has_gpu: bool,
    words: str,
) -> None:
    monkeypatch.setattr("polar_trl.grpo.memory.setup.find_spec", lambda _name: object() if is_installed else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"], vocab_size=512, hidden_size=64, intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ).save_pretrained(tmp_path)  # fmt: skip
    keys = ["--config", RUN, "--gpu", "80GB", "--model_name_or_path", str(tmp_path)]
    keys += ["--vllm_max_model_length", "2048", "--max_tokens_per_device", "2048"]
    assert main(["plan", *keys]) == 0
    assert f"gated delta nets: {words}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3", "ddp_8gpu"])
def test_full_fine_tuning_over_eight_gpus(capsys: pytest.CaptureFixture[str], qwen3_4b: str, name: str) -> None:
    keys = ("--config", RUN, "--gpu", "80GB", "--model_name_or_path", qwen3_4b, "--use_peft", "false")
    file = str(ROOT / "polar_trl" / "configs" / "accelerate" / f"{name}.yaml")
    report = plan(capsys, 1 if name == "ddp_8gpu" else 0, *keys, "--accelerate", file)
    shards = 8 if name in ("fsdp2", "deepspeed_zero3") else 1
    width = 2 if name.startswith("deepspeed") else 4
    assert report["phases"]["training"]["trainer: weights"] == 4_022_468_096 * width // shards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "big"], "--gpu is 'big'; give the memory of one GPU, such as 80GB"),
        (["--gpu", "80GB", "--gpus", "-1"], "--gpus is -1; it must be at least 1"),
        (["--gpu", "80GB", "--lora_rr", "3"], "Did you mean 'lora_r'?"),
        (["--gpu", "80GB", "--model_name_or_path", ""], "model_name_or_path is needed"),
        (["--gpu", "80GB", "--learning_rate", "fast"], "learning_rate is 'fast'; give a number"),
        (["--gpu", "80GB", "--model_name_or_path", "no/such"], "no model at 'no/such'"),
        (
            ["--gpu", "80GB", "--accelerate", "no.yaml"],
            "--accelerate: no file at 'no.yaml', and no accelerate file of that",
        ),
        (["--gpu", "80GB", "--accelerate", RUN], "is no accelerate file: it names no distributed_type"),
        (["--gpu", "80GB", "--use_cpu", "true"], "use_cpu is true: this run uses no GPU"),
        (
            ["--gpu", "80GB", "--attn_implementation", "sdpa"],
            "'sdpa' would not be used: packed rows",
        ),
        (["--gpu", "80GB", "--model_revision", "v2"], "model_revision is not read: the engine loads"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", "--config", RUN, *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("polar-trl: ") and message in said


def test_other_subcommands_still_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "x", "--bogus"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: abc", "num_processes is 'abc'; it must be a number above 0"),
        ("distributed_type: FSDP\nfsdp_config: yes", "fsdp_config is True; it must be a mapping"),
    ],
)
def test_a_malformed_accelerate_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_accelerate(path)
