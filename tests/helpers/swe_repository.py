"""Build a tiny repository that pretends to be one that swebench knows, and its row: for the tests of its grader."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import docker
import pluggy
from environments import save_image

from polar_trl.tasks.swebench import build_swebench_tasks
from polar_trl.types import Task

FIX = """\
diff --git a/src/flask/tiny.py b/src/flask/tiny.py
--- a/src/flask/tiny.py
+++ b/src/flask/tiny.py
@@ -1,2 +1,2 @@
 def f(x):
-    return x
+    return x + 1
"""
TEST_PATCH = """\
diff --git a/tests/test_tiny.py b/tests/test_tiny.py
--- a/tests/test_tiny.py
+++ b/tests/test_tiny.py
@@ -3,3 +3,12 @@

 def test_kind():
     assert f(1) > 0
+
+
+def test_f():
+    assert f(1) == 2
+
+
+@pytest.mark.parametrize("x", ["a b", "a c"])
+def test_cut(x):
+    assert f(1) and x
"""
TEST_PATCH_TOP = "import sys; sys.path.insert(0, 'src'); import pytest; from flask.tiny import f\n"


def make_repository(folder: Path) -> str:
    """The repository before the fix, its later commit behind a tag; the base commit."""
    (folder / "src" / "flask").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src" / "flask" / "__init__.py").write_text("")
    (folder / "src" / "flask" / "tiny.py").write_text("def f(x):\n    return x\n")
    (folder / "tests" / "test_tiny.py").write_text(f"{TEST_PATCH_TOP}\n\ndef test_kind():\n    assert f(1) > 0\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=base")
    base = git(folder, "rev-parse", "HEAD")
    # what the images of the data set have: a commit of theirs on top
    git(folder, "commit", "--quiet", "--allow-empty", "--message=SWE-bench")
    return base


def build_image(context: Path, tag: str) -> str:
    """Build an image as the data set has them: the repository at /testbed, a conda that does nothing, and pytest.

    Returns:
        The base commit.
    """
    base = make_repository(context / "testbed")
    site = Path(pluggy.__file__).parents[1]
    info = next(site.glob("pluggy-*.dist-info")).name
    for name in ("pytest", "_pytest", "pluggy", info, "iniconfig", "packaging", "pygments"):
        shutil.copytree(site / name, context / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(site / "py.py", context / "site")
    (context / "activate").write_text("conda() { :; }\n")
    (context / "pytest").write_text(
        "#!/usr/bin/python3\nimport sys\nsys.path.insert(0, '/opt/site')\nimport pytest\n"
        "sys.exit(pytest.console_main())\n"
    )
    (context / "pytest").chmod(0o755)
    (context / "Dockerfile").write_text(
        "FROM polar-trl-test:latest\nCOPY site /opt/site\nCOPY activate /opt/miniconda3/bin/activate\n"
        "COPY pytest /usr/local/bin/pytest\nCOPY testbed /testbed\n"
    )
    client = docker.from_env()
    client.images.build(path=str(context), tag=tag, rm=True)
    client.close()
    return base


def save_swe_image(folder: Path) -> tuple[str, str]:
    """Save such an image, which no engine keeps, to an archive; its path and the base commit."""
    name = "polar-trl-swe-test:saved"
    base_commit = build_image(folder / "context", name)
    archive = save_image(name, folder)
    client = docker.from_env()
    client.images.remove(name, force=True)
    client.close()
    return archive, base_commit


def build_row(base_commit: str, **changes: str) -> dict[str, str]:
    """The row as a data set has it."""
    row = {
        "instance_id": "pallets__flask-5063",
        "repo": "pallets/flask",
        "version": "2.3",
        "base_commit": base_commit,
        "environment_setup_commit": base_commit,
        "problem_statement": "f must add one.",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": '["tests/test_tiny.py::test_f"]',
        # the second is one of those that a blank has cut
        "PASS_TO_PASS": '["tests/test_tiny.py::test_kind", "tests/test_tiny.py::test_cut[a"]',
    }
    return row | changes


def build_task(base_commit: str, **changes: str) -> Task:
    """The row as a task."""
    (task,) = build_swebench_tasks([build_row(base_commit, **changes)])
    return replace(task, grade_timeout_s=120.0)


def git(folder: Path, *words: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{role}_{name}": "test@localhost" for role in ("AUTHOR", "COMMITTER") for name in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()
