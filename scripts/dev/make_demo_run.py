#!/usr/bin/env python3
"""Make a run's folder with all that a run can have: a scripted model, and a real agent, proxy, sandbox and runner.

    python scripts/dev/make_demo_run.py --out /tmp/demo-run         then: polar-trl inspect /tmp/demo-run

Sessions are real records: the agent of scripts/dev/demo_agent.py calls the proxy, runs its tools and is graded. What
the model says is scripted, and so are the figures that a trainer would write: log-probabilities are drawn at random,
and the trainer's differ from the engine's by a little noise. The folder must not exist yet.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from transformers import AutoTokenizer

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.base import Grade, Grader, report_output
from polar_trl.grpo.credit.advantage import compute_advantages
from polar_trl.grpo.logs.evaluations import Evaluations
from polar_trl.grpo.logs.metrics import build_rollout_metrics, count_rollout
from polar_trl.grpo.logs.trained_rows import TrainedRows, describe_rollout, describe_row
from polar_trl.grpo.rows import Row, build_rows
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.types import ChatRequest, Completion, Purpose, Task, TokenIds

ROOT = Path(__file__).resolve().parents[2]
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PAGER = '''"""Cuts a list of entries into pages."""


def page_count(num_entries: int, per_page: int) -> int:
    """Count the pages."""
    return num_entries // per_page + 1


def entries_of(page: int, entries: list, per_page: int) -> list:
    """The entries of a page, which is counted from 1."""
    start = (page - 1) * per_page
    return entries[start : start + per_page]
'''
REPORT = (
    "from pager import page_count\n\n\ndef describe(entries):\n    return f'{page_count(len(entries), 10)} pages'\n"
)
TEST = """import sys

from pager import page_count

for entries, pages in ((0, 0), (1, 1), (10, 1), (11, 2), (100, 10)):
    got = page_count(entries, 10)
    if got != pages:
        sys.exit(f"FAILED test_pager.py::pages[{entries}] - {got} pages, and not {pages}")
    print("ok", f"page_count({entries}, 10) == {got}")
print("5 passed – all pages add up ✓")
"""
GOOD = "sed -i 's|return num_entries // per_page + 1|return -(-num_entries // per_page)|' pager.py"
BAD = "sed -i 's|// per_page + 1|// per_page|' pager.py"
TASKS = (
    Task(
        id="pager-count",
        instruction="page_count in pager.py says one page too many when the last page is full. Please fix it.",
        files={"pager.py": PAGER, "report.py": REPORT, "test_pager.py": TEST},
        agent_timeout_s=60.0,
    ),
    Task(
        id="pager-audit",
        instruction="Read every file here line by line, then fix what is wrong with the number of pages.",
        files={"pager.py": PAGER, "report.py": REPORT, "test_pager.py": TEST},
        agent_timeout_s=60.0,
    ),
)


class DemoHarness(ShellHarness):
    """The demo agent, whose requests without tools are its side business."""

    def classify(self, request: ChatRequest) -> Purpose:
        """Titles declare no tools."""
        return "policy" if request.tools else "auxiliary"


class ScriptedModel:
    """Reply to a prompt, by what stands in it.

    Args:
        tokenizer: Spells the prompt and the reply.
        seed: Of what it leaves to chance.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self.skill = 0.2
        """Chance of the right fix."""
        self.version = 1

    def reply(self, prompt_ids: TokenIds) -> Completion:
        """Text from the script, log-probabilities from chance."""
        text = self._choose(self._tokenizer.decode(prompt_ids))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        logprobs = [self._draw_logprob() for _ in ids]
        # sessions that are long enough stay open over a step and see the next policy
        version = self.version + (len(prompt_ids) > 900)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason="stop",
            first_policy_version=version,
            last_policy_version=version,
        )

    def _draw_logprob(self) -> float:
        if self._random.random() < 0.06:
            return -self._random.uniform(1.0, 6.0)
        return -min(8.0, self._random.expovariate(9.0))

    def _choose(self, prompt: str) -> str:
        last = prompt[prompt.rfind("<|im_start|>user") :]
        if "Write a title" in last:
            return "Fix page count<|im_end|>"
        if "You search code" in prompt[:900]:
            if "<tool_response>" in last:
                return self._say("One match is enough.", "report.py calls page_count in describe(), line 5.")
            return self._call("I grep for the name.", "bash", command="grep -rn page_count --include=*.py .")
        if "once more" in last:
            return self._call("They want the last line.", "bash", command="python3 test_pager.py | tail -n 1")
        if "once more" in prompt:
            return self._say("That is the line.", "The last line is: 5 passed – all pages add up ✓")
        if "line by line" in prompt and "summed up" not in prompt:
            done = prompt.count("<tool_response>")
            name = ("pager.py", "report.py", "test_pager.py")[done % 3]
            command = f"sed -n '{1 + done // 3 * 5},{5 + done // 3 * 5}p' {name} | cat -A"
            said = f"Reading {name} from line {1 + done // 3 * 5}."
            return self._call(f"Part {done + 1} of what there is to read.", "bash", said, command=command)
        return self._fix(prompt.count("<tool_response>"))

    def _fix(self, done: int) -> str:
        if done == 0:
            thought = "The user says that a full last page is counted twice.\nI look at the code first, naïvely."
            return self._call(thought, "bash", "Let me look at the code.", command="cat pager.py && ls -la")
        if done == 1:
            question = "Which files call page_count, and do they rely on the extra page?"
            return self._call("Others may rely on it.", "delegate", question=question)
        if done == 2:
            command = GOOD if self._random.random() < self.skill else BAD
            return self._call("Round up instead of adding one.", "bash", "I change one line.", command=command)
        if done == 3:
            return self._call("Now the tests.", "bash", command="python3 test_pager.py")
        return self._say("I have seen the tests.", "I changed page_count to round up; the tests say the rest.")

    def _say(self, thought: str, text: str) -> str:
        return f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>"

    def _call(self, thought: str, name: str, text: str = "", **arguments: str) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        said = f"{text}\n" if text else ""
        return f"<think>\n{thought}\n</think>\n\n{said}<tool_call>\n{body}\n</tool_call><|im_end|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--group", type=int, default=4, help="sessions per task and step")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocabulary", type=Path, default=ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"make_demo_run: {args.out} exists already; give a folder that does not")
    make_run(args.out, args.vocabulary, steps=args.steps, group=args.group, seed=args.seed)


def make_run(out: Path, vocabulary: Path, *, steps: int, group: int, seed: int) -> None:
    """Roll out and write down `steps` steps of two tasks."""
    tokenizer = build_tokenizer(vocabulary)
    tokenizer.save_pretrained(out / "tokenizer")
    settings = {"model": str(out / "tokenizer"), "agent": "demo agent", "max_steps": steps}
    (out / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
    model = ScriptedModel(tokenizer, seed)
    engine = ScriptedEngine(model.reply, delay_s=0.02)
    renderer = FamilyRenderer(tokenizer, "qwen3", thinking="template")
    agent = (ROOT / "scripts" / "dev" / "demo_agent.py").read_text(encoding="utf-8")
    with Proxy(engine, renderer, params=GenerationParams(max_tokens=2000)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(),
            harness=DemoHarness("python3 -I -S ~/demo_agent.py {instruction}", files={"demo_agent.py": agent}),
            grader=Grades(seed),
            config=RolloutConfig(max_agents=4),
        )
        writer = Writer(out, group, seed)
        for step in range(steps):
            model.skill, model.version = 0.3 + 0.5 * step / steps, step + 1
            began = time.monotonic()
            finished = runner.run(writer.build_jobs("train", step))
            writer.write_step(step, finished, time.monotonic() - began)
            print(f"step {step + 1} of {steps}", flush=True)
        writer.write_evaluation(steps, runner.run(writer.build_jobs("eval", steps)))


class Grades(Grader):
    """The demo's grader: the tests decide, and now and then it fails."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed + 1)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """1 where the tests pass. Raises in one of 16 sessions."""
        if self._random.random() < 1 / 16:
            raise RuntimeError("the machine that grades ran out of disk")
        result = sandbox.run("python3 test_pager.py 2>&1", env={}, timeout_s=timeout_s)
        return Grade(reward=float(result.exit_code == 0), report=report_output(result.stdout))


class Writer:
    """Write what a trainer leaves in a run's folder, of sessions that were rolled out."""

    def __init__(self, out: Path, group: int, seed: int) -> None:
        self._out = out
        self._group = group
        self._noise = np.random.default_rng(seed)
        self._attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank0"
        self._rows = TrainedRows(out, self._attempt)

    def build_jobs(self, mode: str, batch: int) -> list[Job]:
        """A group of each task."""
        folder = self._out / "sessions" / self._attempt / f"{mode}_{batch:05d}"
        jobs = []
        for number, task in enumerate(TASKS):
            for index in range(self._group):
                group_id = f"{mode}-{batch:05d}-g{number:03d}"
                name = f"{group_id}-r{index:03d}"
                jobs.append(Job(rollout_id=name, group_id=group_id, task=task, record_path=folder / f"{name}.jsonl"))
        return jobs

    def write_step(self, step: int, finished: Sequence[RolloutResult], seconds: float) -> None:
        """Rows with the trainer's figures, and a line of the log."""
        rewards_RF = torch.tensor([[_read_reward(result)] for result in finished])
        advantages = compute_advantages(
            rewards_RF,
            torch.ones(1),
            num_generations=self._group,
            scale_rewards="group",
            aggregation="sum_then_normalize",
        )
        described, kept, dropped = [], [], Counter[str]()
        for result, reward, advantage, scored, flat in zip(
            finished,
            advantages.rewards_R.tolist(),
            advantages.advantages_R.tolist(),
            advantages.scored_R.tolist(),
            advantages.zero_variance_R.tolist(),
            strict=True,
        ):
            reason = None if scored else "no_reward"
            if scored and flat:
                reason = "zero_variance"
                dropped[reason] += sum(sum(trajectory.trainable) for trajectory in result.reconstruction.trajectories)
            record = self._rows.name_record(result.record_path)
            described.append(describe_rollout(result.rollout, record, reward, advantage, dropped=reason))
            if reason is None:
                kept.append((result, advantage))
        self._rows.write_rollouts("train", step + 1, described)
        rows, others = build_rows(kept, max_tokens=5000, oldest_version=step, name_record=self._rows.name_record)
        gaps = self._write_rows(step + 1, rows)
        metrics = build_rollout_metrics([count_rollout(result) for result in finished])
        metrics |= {f"polar/dropped/{reason}": count for reason, count in (dropped + others).items()}
        self._log(
            step + 1,
            {
                "reward": float(np.nanmean(rewards_RF.numpy())),
                "reward_std": float(np.nanstd(rewards_RF.numpy())),
                "frac_reward_zero_std": advantages.zero_variance_R.float().mean().item(),
                **_summarize_gaps(gaps),
                "polar/trained_tokens": sum(row.num_trainable for row in rows),
                "polar/phase/rollouts_s": seconds,
                "polar/phase/training_s": seconds * self._noise.uniform(0.3, 0.5),
                "polar/phase/optimizer_s": seconds * 0.03,
                "polar/phase/weight_sync_s": seconds * self._noise.uniform(0.04, 0.06),
                **metrics,
            },
        )

    def write_evaluation(self, step: int, finished: Sequence[RolloutResult]) -> None:
        """The rewards of sessions that train nothing."""
        described = [
            describe_rollout(
                result.rollout,
                self._rows.name_record(result.record_path),
                _read_reward(result),
                0.0,
                dropped=None,
            )
            for result in finished
        ]
        self._rows.write_rollouts("eval", step, described)
        evaluations, rewards = Evaluations(), [_read_reward(result) for result in finished]
        graded = zip(finished, rewards, strict=True)
        evaluations.note([(result.rollout.task_id, reward) for result, reward in graded if not np.isnan(reward)])
        logs = {"eval_reward": float(np.nanmean(rewards)), "eval_runtime": 60.0}
        self._log(step, logs | evaluations.take_figures(logs))

    def _write_rows(self, step: int, rows: Sequence[Row]) -> Any:
        """|trainer's minus engine's| log-probability of all trained tokens."""
        gaps = []
        for row in rows:
            engine_C = row.logprobs_T[row.trainable_T].astype(float)
            # unsure tokens differ more, as they do on real hardware
            noise_C = self._noise.normal(scale=0.002 + 0.02 * np.sqrt(-engine_C))
            trainer_C = np.minimum(engine_C + noise_C, -1e-6)
            gaps.append(np.abs(trainer_C - engine_C))
            self._rows.note([describe_row(row)], torch.tensor(trainer_C)[None])
        self._rows.write_rows(step)
        return np.concatenate([np.zeros(0), *gaps])

    def _log(self, step: int, values: dict[str, Any]) -> None:
        with (self._out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def build_tokenizer(vocabulary: Path) -> Any:
    """A vocabulary with the markup and the chat template of Qwen3."""
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(list(MARKUP), special_tokens=False)
    tokenizer.unk_token = None  # here "<|endoftext|>", which Qwen's format knows as a token of its own
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


def _summarize_gaps(gaps: Any) -> dict[str, float]:
    """As TRL names them; nothing for a step that trained nothing."""
    if not len(gaps):
        return {}
    values = {"mean": gaps.mean(), "p99": np.quantile(gaps, 0.99), "max": gaps.max()}
    return {f"sampling/sampling_logp_difference/{name}": float(value) for name, value in values.items()}


def _read_reward(result: RolloutResult) -> float:
    reward = result.rollout.reward
    return float("nan") if reward is None else reward


if __name__ == "__main__":
    main()
