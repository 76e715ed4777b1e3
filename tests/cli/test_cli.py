"""`polar-trl` itself, and what its commands and scripts have in common."""

import logging
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


def test_of_bitsandbytes_one_message_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "No module named 'kernels'")
    logger.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


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
