"""Train two steps and push to the hub after each: `hub_worker.py MODEL OUT`. The hub is reached no further than here.

Writes the paths of every commit to OUT.json.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_DISABLE_XET"] = "1"  # else uploads begin before there is a commit

from huggingface_hub import HfApi
from worker_common import build_trainer

commits: list[list[str]] = []


def create_commit(api: HfApi, repo_id: str, operations: Any, **_: Any) -> Any:
    """In the place of the request: `upload_folder` has chosen and filtered its files before it calls this."""
    assert repo_id == "me/policy"
    commits.append(sorted(operation.path_in_repo for operation in operations))
    return SimpleNamespace(oid="0" * 40, commit_url="", pr_url=None)


HfApi.create_commit = create_commit  # type: ignore[method-assign]
HfApi._validate_yaml = lambda *_, **__: None  # type: ignore[method-assign] # a request about the card
HfApi.create_repo = lambda api, name, **_: SimpleNamespace(repo_id="me/policy")  # type: ignore[method-assign]

model, out = sys.argv[1], Path(sys.argv[2])
trainer = build_trainer(
    *(model, out, ["ok", "ok"]),
    push_to_hub=True,
    hub_model_id="me/policy",
    hub_token="hf_secret",
    hub_strategy="every_save",
    hub_always_push=True,
    save_strategy="steps",
    save_steps=1,
    max_steps=2,
    log_completions=True,
)
trainer.train()
trainer.save_model()
(out / "rewards.png").write_bytes(b"a figure")
(out / "sessions" / "config.json").write_text("{}")  # an agent may call its files as it likes
(out / "completions" / "model.safetensors").write_text("{}")
trainer.push_to_hub()
trainer.close()
out.with_suffix(".json").write_text(json.dumps(commits))
