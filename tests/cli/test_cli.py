"""`polar-trl` itself, and what its commands and scripts have in common."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import polar_trl
from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.run_folder import make_output_dir


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"polar-trl {polar_trl.__version__}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: %s"),
        ("vllm.triton_utils.importing", "Triton is installed, but doesn't include CPU backend. Disabling Triton."),
        ("transformers.training_args", "torch.distributed process group is initialized, but parallel_mode != ..."),
    ],
)
def test_of_a_logger_one_message_is_hidden(name: str, message: str) -> None:
    logger = logging.getLogger(name)
    shown = [record for text in (message, "another") if logger.filter(record := _build_record(name, text))]
    assert [record.msg for record in shown] == ["another"]


def _build_record(name: str, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, __file__, 1, text, None, None)


def test_a_vllm_that_trl_does_not_know_is_no_news() -> None:
    code = (
        "{} trl.import_utils as trl\ntrl._is_package_available = lambda *_, **__: (True, '0.99.0')\n"
        "print(trl.is_vllm_available())"
    )
    for imports, is_warned in (("import", True), ("import polar_trl,", False)):
        command = [sys.executable, "-c", code.format(imports)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.stdout == "True\n"
        assert ("currently supports vLLM versions" in done.stderr) is is_warned


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polar_trl", "--version"], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == f"polar-trl {polar_trl.__version__}\n"


def test_a_folder_that_cannot_be_made_or_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", r"cannot be written \(Not a directory\)"),
        (Path("/proc/nope"), r"cannot be written \(No such file or directory\)"),
        (Path("/proc"), r"cannot be written \(No such file or directory\)"),
    ):
        with pytest.raises(ConfigError, match=rf"^output_dir {folder} {reason}; name another output_dir$"):
            make_output_dir(folder)
    make_output_dir(tmp_path / "new" / "folder")
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "folder"]
    assert list((tmp_path / "new" / "folder").iterdir()) == []
