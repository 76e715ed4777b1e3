"""No secret is in what is written: by its name, by its value, by its form."""

from pathlib import Path

import pytest

from polar_trl.grpo.logs.redact import Redactor, is_secret

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "name", ["hub_token", "HF_TOKEN", "api_key", "OPENAI_API_KEY", "apikey", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_session_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "monkey", "by_keys"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_a_value_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "from-the-environment")
    redactor = Redactor({"options": [{"api_key": "from-the-settings"}], "hub_token": "short"})
    found = redactor.redact(
        {
            "command": "run.py from-the-settings --hub-token short --api_key=a1 and from-the-environment",
            "options": {"api_key": "from-the-settings", "steps": 3, "list": ["hf_abcdefghijklmnop", None]},
            "base_url": "https://me:word@host/v1",
        }
    )
    assert found == {
        "command": "run.py (secret) --hub-token (secret) --api_key=(secret) and (secret)",
        "options": {"api_key": "(secret)", "steps": 3, "list": ["(secret)", None]},
        "base_url": "https://(secret)@host/v1",
    }


def test_a_run_file_keeps_all_that_is_no_secret() -> None:
    redactor = Redactor({})
    text = 'env:\n  HF_TOKEN: abc\n  WANDB_API_KEY: "def"\nmax_steps: 3  # the token of the hub\n'
    text += "agent_command: agent --api-key {api_key} --key $KEY\n"
    assert redactor.redact_text(text) == text.replace("abc", "(secret)").replace("def", "(secret)")
    paths = list((ROOT / "polar_trl").glob("**/configs/**/*.yaml"))
    assert paths
    for path in paths:
        assert redactor.redact_text(path.read_text()) == path.read_text(), path
