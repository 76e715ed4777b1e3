"""Real training while sessions stay open: every token has the version of the weights that sampled it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from launch import run_worker
from records import read_session
from transformers import AutoModelForCausalLM

from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.types import Call


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_change_in_mid_session(tiny_model: Path, tmp_path: Path, processes: int) -> None:
    run_worker("carry_over_worker.py", str(tiny_model), str(tmp_path), processes=processes)
    rollouts = {r.id: r for r in (read_session(path) for path in tmp_path.glob("sessions/**/*.jsonl"))}
    models = {}
    for step in range(5):
        models[step + 1] = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
        models[step + 1].load_state_dict(torch.load(tmp_path / f"weights-{step}.pt", weights_only=True))

    def gap(call: Call, version: int) -> float:
        """Mean difference in nats between what is on record and what the weights of a version give."""
        ids = torch.tensor([call.prompt_ids + call.completion.token_ids])
        with torch.no_grad():
            logps = models[version](ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logps.gather(-1, torch.tensor(call.completion.token_ids)[:, None])[:, 0]
        return (own - torch.tensor(call.completion.logprobs)).abs().mean().item()

    trained = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    ids = [rollout_id for line in trained for rollout_id in line["rollouts"]]
    assert len(ids) == len(set(ids)) == 4 * (8 if processes == 1 else 12)
    # whole groups, wherever their sessions ran
    assert set(Counter(rollout_id.rsplit("-", 1)[0] for rollout_id in ids).values()) == {4}
    straddling = 0
    for line in trained:
        for rollout in (rollouts[rollout_id] for rollout_id in line["rollouts"]):
            versions = [call.completion.first_policy_version for call in rollout.calls]
            assert versions == [call.completion.last_policy_version for call in rollout.calls]
            # trained at most one step late, by the policy whose version is the step's number
            assert line["step"] - 1 <= min(versions) <= max(versions) <= line["step"]
            for call, version in zip(rollout.calls, versions, strict=True):
                assert gap(call, version) < 1e-4
            if len(set(versions)) > 1:
                straddling += 1
                # the weights did change, so that the wrong version would have been noticed
                assert gap(rollout.calls[0], versions[-1]) > 1e-3
                (trajectory,) = build_prefix_merged(rollout).trajectories
                sampled = [v for v in trajectory.policy_versions if v >= 0]
                expected = [v for c, v in zip(rollout.calls, versions, strict=True) for _ in c.completion.token_ids]
                assert sampled == expected
    assert straddling >= 4
