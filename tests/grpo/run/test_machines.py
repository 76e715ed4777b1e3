"""What ranks must have in common is checked with two processes that differ; both end, with a sentence that says where.

Machines of their own are in scripts/test_machines.sh.
"""

import json
import os
import socket

import psutil
import pytest
from launch import run_worker

from polar_trl.errors import ConfigError
from polar_trl.grpo.run.machines import choose_interface

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("machines")
    run_worker("machines_worker.py", str(out), processes=2)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("what", ["alike", "objects", "none fails", "shared", "again"])
def test_ranks_that_are_alike_go_on(said: list[dict[str, str]], what: str) -> None:
    assert [of_rank[what] for of_rank in said] == ["fine", "fine"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("settings", f"max_steps is 4 on {HOST} (rank 1) and 3 on {HOST} (rank 0) (and agent differ): give all"),
        ("versions", f"the version of vllm is 0.31.1 on {HOST} (rank 1) and 0.31.0 on {HOST} (rank 0): give all"),
        (
            "not shared",
            f"is not the folder that rank 0 has on {HOST}: put it on a file system that all machines share",
        ),
        ("not writable", "output_dir /proc/nothing cannot be written"),
    ],
)
def test_a_difference_ends_both_with_one_sentence(said: list[dict[str, str]], what: str, sentence: str) -> None:
    for of_rank in said:
        assert of_rank[what].startswith("ConfigError: ") and sentence in of_rank[what]


def test_the_folder_that_is_not_shared_is_named(said: list[dict[str, str]]) -> None:
    first, second = said
    assert "/of-rank1 is not the folder" in second["not shared"]
    assert first["not shared"].startswith(f"ConfigError: rank 1 on {HOST}: output_dir ")


def test_a_long_value_is_cut_and_told_apart_by_its_digest(said: list[dict[str, str]]) -> None:
    own, others = (part.split("digest ")[1][:8] for part in said[0]["long"].split(" and ", 1))
    assert own != others
    assert len(said[0]["long"]) < 400


def test_a_rank_that_fails_takes_the_other_with_it(said: list[dict[str, str]]) -> None:
    assert [of_rank["one fails"] for of_rank in said] == [
        f"ConfigError: rank 1 on {HOST}: no agent here",
        "FileNotFoundError: no agent here",
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return monkeypatch


def test_ranks_take_the_network_that_leads_to_the_first_machine(launched: pytest.MonkeyPatch) -> None:
    found = psutil.net_if_addrs()
    name, address = next(
        (name, each.address)
        for name, addresses in found.items()
        for each in addresses
        if name != "lo" and each.family is socket.AF_INET
    )
    launched.setenv("MASTER_ADDR", address)
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.1.1", rf"127.0.1.1 is the loopback on {HOST}, .*--main_process_ip, or set GLOO_SOCKET_IFNAME"),
        ("no.such.host.invalid", rf"no.such.host.invalid, cannot be reached from {HOST}"),
    ],
)
def test_a_first_machine_that_others_do_not_reach(launched: pytest.MonkeyPatch, address: str, sentence: str) -> None:
    launched.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match=sentence):
        choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("variable", "value"), [("GLOO_SOCKET_IFNAME", "mine0"), ("GROUP_WORLD_SIZE", "1")])
def test_a_choice_of_the_users_and_a_single_machine_stay(
    launched: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    launched.setenv("MASTER_ADDR", "127.0.0.1")
    launched.setenv(variable, value)
    choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("mine0" if variable == "GLOO_SOCKET_IFNAME" else None)
