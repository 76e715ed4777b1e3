"""Test what counts as a whole model, or a whole adapter, in a folder."""

import os
import shutil
from pathlib import Path

import pytest

from polar_trl.errors import ConfigError
from polar_trl.grpo.resume.model_folder import find_model


def copy_model(tiny_model: Path, folder: Path, *left_out: str) -> Path:
    """Link the files of a model into a folder of its own."""
    folder.mkdir(parents=True)
    for path in tiny_model.iterdir():
        if path.name not in left_out:
            os.link(path, folder / path.name)
    return folder


def test_a_model_is_told_by_its_files(tmp_path: Path, tiny_model: Path) -> None:
    whole, other = (copy_model(tiny_model, tmp_path / name) for name in ("whole", "other"))
    (other / "chat_template.jinja").unlink(missing_ok=True)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    name, digest = find_model(str(whole)).identity.split()[:2]
    assert (name, digest) == ("whole", find_model(str(tiny_model)).identity.split()[1])
    assert digest != find_model(str(other)).identity.split()[1]


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("left_out", "added", "message"),
    [
        (["model.safetensors"], {}, "lacks weights"),
        (["tokenizer.json", "tokenizer_config.json"], {}, "has no tokenizer"),
        ([], {"polar_state.json.part": b""}, "was not written to its end"),
        ([], {INDEX: b'{"weight_map": {"w": "model-00002-of-00002.safetensors"}}'}, "lacks model-00002-of-00002"),
        ([], {INDEX: b'{"weight_map": '}, "is no index of weights"),
        (
            [],
            {INDEX: b'{"weight_map": {"w": "part-1.safetensors"}}', "part-1.safetensors": b"\0" * 20},
            r"part-1\.safetensors is not whole",
        ),
        (["model.safetensors"], {"model.safetensors": b"\0" * 100_000}, r"model\.safetensors is not whole"),
        (["model.safetensors"], {"pytorch_model.bin": b""}, r"pytorch_model\.bin is not whole"),
        (["model.safetensors"], {"pytorch_model.bin": b"PK\3\4 and no end"}, r"pytorch_model\.bin is not whole"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(
    tmp_path: Path, tiny_model: Path, left_out: list[str], added: dict[str, bytes], message: str
) -> None:
    folder = copy_model(tiny_model, tmp_path / "model", *left_out)
    for name, content in added.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        find_model(str(folder))


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ("{}", None, "names no base_model_name_or_path"),
        ('{"base_model_name_or_path": "/no/base"}', None, r"is an adapter without adapter_model\.safetensors"),
        ('{"base_model_name_or_path": "/no/base"}', "empty", r"adapter_model\.safetensors is not whole"),
        ('{"base_model_name_or_path": "/no/base"}', "whole", "is an adapter of '/no/base', which cannot be found"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(
    tmp_path: Path, tiny_model: Path, config: str, weights: str | None, message: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    if weights is not None:
        (tmp_path / "adapter_model.safetensors").touch()
    if weights == "whole":
        shutil.copy(tiny_model / "model.safetensors", tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        find_model(str(tmp_path))


def test_a_model_has_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-20").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is a run's folder without a final model; name .*checkpoint-20"):
        find_model(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="model_name_or_path is needed"):
        find_model(None)
