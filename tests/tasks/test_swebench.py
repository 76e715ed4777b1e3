"""Rows of the three data sets: image, tests and limits are found, and a row that cannot be decided is refused."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.swebench import build_swebench_tasks, load_swebench

TEST_PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-x
+y
diff --git "a/tests/\\303\\251.txt" "b/tests/\\303\\251.txt"
"""

VERIFIED: dict[str, Any] = {
    "instance_id": "Org__repo-12",
    "repo": "Org/repo",
    "base_commit": "abc",
    "problem_statement": "It {breaks}.\n",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["t::a", "t::b"]',
    "PASS_TO_PASS": "[]",
    "version": "4.3",
    "environment_setup_commit": "def",
    "shape": "round",
}
SWE_GYM: dict[str, Any] = {
    **{name: value for name, value in VERIFIED.items() if name not in ("environment_setup_commit", "shape")},
    "FAIL_TO_PASS": ["t::a"],
    "PASS_TO_PASS": ["t::c"],
}


def test_a_row_of_verified() -> None:
    (task,) = build_swebench_tasks([VERIFIED])
    assert task.id == "Org__repo-12"
    assert task.image == "swebench/sweb.eval.x86_64.org_1776_repo-12:latest"
    assert "It {breaks}." in task.instruction and "Org/repo" in task.instruction
    assert task.tests is not None
    assert (task.tests.runner, task.tests.fail_to_pass, task.tests.pass_to_pass) == ("swebench", ("t::a", "t::b"), ())
    assert task.tests.protected == ("tests/test_a.py", "tests/\\303\\251.txt")
    assert (task.prepare_timeout_s, task.agent_timeout_s, task.grade_timeout_s) == (600.0, 1800.0, 1800.0)
    assert task.metadata["unread"] == ["shape"]
    # what an eval script installs goes into the image's own Python
    assert (task.workdir, task.workspace, task.writable_root, task.network) == ("/testbed", None, True, "none")
    assert task.metadata["swebench"] == {
        name: value for name, value in VERIFIED.items() if name not in ("shape", "FAIL_TO_PASS", "PASS_TO_PASS")
    }
    json.dumps(task.metadata)


def test_a_row_of_swe_gym_and_the_same_within_skyrl() -> None:
    (task,) = build_swebench_tasks([SWE_GYM])
    assert task.image == "xingyaoww/sweb.eval.x86_64.org_s_repo-12:latest"
    assert task.tests is not None and task.tests.pass_to_pass == ("t::c",)
    assert build_swebench_tasks([{"data_source": "swe-gym", "prompt": [], "instance": SWE_GYM}]) == [task]
    assert build_swebench_tasks([{"instance": json.dumps(SWE_GYM)}]) == [task]


def test_a_row_may_name_its_image() -> None:
    (task,) = build_swebench_tasks([{**VERIFIED, "image": "mine:1", "eval_script": "run", "log_parser": "pytest"}])
    assert task.image == "mine:1"
    assert (task.metadata["swebench"]["eval_script"], task.metadata["swebench"]["log_parser"]) == ("run", "pytest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": None}, "row 0: 'instance_id' must be text, not None"),
        ({"base_commit": 3}, "row 0 (task 'Org__repo-12'): 'base_commit' must be text, not 3"),
        ({"problem_statement": " "}, "row 0 (task 'Org__repo-12'): 'problem_statement' must be text"),
        ({"FAIL_TO_PASS": "[]"}, "row 0 (task 'Org__repo-12'): 'FAIL_TO_PASS' is empty"),
        ({"FAIL_TO_PASS": "[1]"}, "row 0 (task 'Org__repo-12'): 'FAIL_TO_PASS' must be a list of texts, not '[1]'"),
        ({"PASS_TO_PASS": "t::a"}, "row 0 (task 'Org__repo-12'): 'PASS_TO_PASS' must be a list of texts"),
        ({"PASS_TO_PASS": None}, "row 0 (task 'Org__repo-12'): 'PASS_TO_PASS' must be a list of texts, not None"),
        ({"test_patch": "words"}, "row 0 (task 'Org__repo-12'): 'test_patch' is no patch of git"),
        ({"image": 3}, "row 0 (task 'Org__repo-12'): 'image' must be text, not 3"),
        ({"instance": "words"}, "row 0: 'instance' must be an object, not 'words'"),
    ],
)
def test_bad_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_swebench_tasks([{**VERIFIED, **change}])
    assert message in str(caught.value)


def test_ids_are_unique_and_there_is_a_row() -> None:
    with pytest.raises(TaskError, match="row 1: the id 'Org__repo-12' is there twice"):
        build_swebench_tasks([VERIFIED, SWE_GYM])
    with pytest.raises(TaskError, match="has no rows"):
        build_swebench_tasks([])


def make_rows(number: int) -> list[dict[str, Any]]:
    return [{**VERIFIED, "instance_id": f"Org__repo-{index}"} for index in range(number)]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_files_and_folders(tmp_path: Path) -> None:
    rows = make_rows(3)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    folder = tmp_path / "data"
    folder.mkdir()
    write_parquet(folder / "test-00000-of-00002.parquet", rows[:2])
    write_parquet(folder / "test-00001-of-00002.parquet", rows[2:])
    write_parquet(folder / "train-00000-of-00001.parquet", [{"instance": SWE_GYM}])
    expected = build_swebench_tasks(rows)
    assert load_swebench(tmp_path / "rows.jsonl") == expected
    assert load_swebench(tmp_path / "rows.json") == expected
    assert load_swebench(folder, split="test") == expected
    assert load_swebench(folder, split="test", limit=2) == expected[:2]
    assert [task.id for task in load_swebench(folder, split="train")] == ["Org__repo-12"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{}\n{"a"\n')
    with pytest.raises(TaskError, match="row 0: 'instance_id' must be text"):
        load_swebench(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(TaskError, match=r"cannot read .*b.jsonl: line 1 is not valid JSON"):
        load_swebench(tmp_path / "b.jsonl")
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match=r"cannot read .*c.parquet"):
        load_swebench(tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match=r"has no \.parquet, \.jsonl or \.json file of split 'x'"):
        load_swebench(tmp_path, split="x")
    with pytest.raises(
        ConfigError, match="no file or folder 'nowhere', and no data set of that name; there are swe-b"
    ):
        load_swebench("nowhere")


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the datasets hub that a download asks for."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/SWE-bench/SWE-bench_Verified/tree/"):
            listing = [
                {"type": "file", "path": path, "size": len(self.files[path]), "oid": "0"} for path in self.files
            ]
            self._answer(json.dumps(listing).encode(), "application/json")
            return
        found = self.files.get(self.path.partition("/resolve/main/")[2])
        if found is None:
            self.send_error(404)
        else:
            self._answer(found, "application/octet-stream")

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        for name, value in (
            *(("Content-Type", kind), ("Content-Length", str(len(body)))),
            *(("ETag", f'"{len(body)}"'), ("X-Repo-Commit", "0" * 40)),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    write_parquet(tmp_path / "test.parquet", make_rows(2))
    data = (tmp_path / "test.parquet").read_bytes()
    handler = type("Handler", (Hub,), {"files": {"data/test-00000-of-00001.parquet": data, "README.md": b"x"}})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_data_set_of_the_hub_by_its_short_name(hub: str) -> None:
    assert load_swebench("SWE-bench-Verified", endpoint=hub) == build_swebench_tasks(make_rows(2))
    assert load_swebench("SWE-bench/SWE-bench_Verified:test", endpoint=hub) == build_swebench_tasks(make_rows(2))
    with pytest.raises(ConfigError, match=r"SWE-bench_Verified has no .* file of split 'filtered'"):
        load_swebench("SWE-bench/SWE-bench_Verified:filtered", endpoint=hub)
    with pytest.raises(ConfigError, match=r"SWE-bench/SWE-bench_Verified has no .* file of split 'train'"):
        load_swebench("swe-bench-verified", split="train", endpoint=hub)


def test_a_hub_that_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"cannot get the data set some/set from the hub: .*; a local file works"):
        load_swebench("some/set", endpoint="http://127.0.0.1:9")
