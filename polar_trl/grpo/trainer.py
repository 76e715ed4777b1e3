"""`PolarGRPOTrainer`: TRL's GRPO, with agents in place of `generate`.

TRL keeps the optimizer, checkpoints, PEFT and logging. What is replaced is the step from data rows to rows to train:
weights go to the engine, agents run against the proxy, their calls become trajectories, and rewards become one
advantage per rollout; `PackedGRPOTrainer` forwards the rows and sums TRL's losses over them. It refuses to hand the
loss a token that the engine did not sample in exactly that context.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from polar_trl.engine import cuda_graphs
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import ColocatedVllm, colocated_vllm, set_environment
from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grpo.advantage import Advantages, compute_advantages
from polar_trl.grpo.carry_over import CarryOver
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.conversation import conversation_after_instruction
from polar_trl.grpo.dataset import build_dataset, parse_task
from polar_trl.grpo.logs.completions_table import CompletionsTable
from polar_trl.grpo.logs.metrics import append_metrics, build_rollout_metrics, count_rollout, nan_std
from polar_trl.grpo.logs.metrics_log import MetricsLog
from polar_trl.grpo.logs.trained_rows import TrainedRows, describe_rollout
from polar_trl.grpo.multimodal import exclude_unreached, freeze_unreached, is_multimodal, load_processing_class
from polar_trl.grpo.packing.forward import pack_rows, score
from polar_trl.grpo.packing.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.preflight import (
    build_default_grader,
    choose_reward_functions,
    read_model_config,
    require_a_step,
)
from polar_trl.grpo.resume.resumable import ResumableTrainer
from polar_trl.grpo.rewards import find_not_finite, mark_not_finite, warn_not_finite, without_trl_warning
from polar_trl.grpo.rows import Row, build_rows
from polar_trl.grpo.selfcheck import check_engine
from polar_trl.grpo.upcoming import UpcomingBatches
from polar_trl.harness.base import Harness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.pool import WarmPool
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Task

logger = logging.getLogger(__name__)


class PolarGRPOTrainer(ResumableTrainer, PackedGRPOTrainer):
    """GRPO on the sessions of an unmodified coding agent.

    Args:
        model: Path or hub id, or a model loaded from one (`name_or_path` must lead the engine to the same weights).
        args: Settings of the run.
        train_dataset: Tasks, or a `Dataset` whose columns are `Task`'s fields.
        eval_dataset: The same, for evaluation.
        harness: The agent.
        sandbox: Where agents run; a folder and a process group each by default. Sandboxes of a `WarmPool` are made
            while the model trains.
        grader: What a session is worth. By default what each task says itself (a command, hidden tests, a verifier);
            tasks that say nothing leave the reward to `reward_funcs`.
        reward_funcs: TRL reward functions, called once per rollout with `prompts`, `completions` (the conversation
            after the instruction), `completion_ids` (all sampled tokens) and `rollouts`. They come after the grader
            in `args.reward_weights`.
        peft_config, processing_class, callbacks, optimizers: As in TRL.

    Raises:
        ConfigError: settings or tasks that cannot work, before anything is loaded where possible.
        EngineError: the engine does not compute what the trainer computes.
        LawError: a law of the design is broken.
    """

    _tag_names = ["trl", "grpo", "polar"]  # noqa: RUF012 - TRL's own declaration
    _num_not_finite = 0
    """Rollouts since the last log that some reward function gave a number for which is none."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: PolarGRPOConfig,
        train_dataset: Sequence[Task] | Dataset | None = None,
        eval_dataset: Sequence[Task] | Dataset | None = None,
        *,
        harness: Harness,
        sandbox: SandboxBackend | None = None,
        grader: Grader | None = None,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        if model is None or isinstance(model, str):
            config = read_model_config(model, trust_remote_code=args.trust_remote_code)
        else:
            config = model.config
        train_rows = build_dataset(train_dataset) if train_dataset is not None else None
        eval_rows = build_dataset(eval_dataset) if eval_dataset is not None else None
        backend = sandbox or LocalSandboxBackend()
        self.grader = grader or build_default_grader(backend, train_rows, eval_rows)
        functions = [mark_not_finite(function) for function in choose_reward_functions(self.grader, reward_funcs)]
        require_a_step(train_rows, args)
        harness.install()
        if is_multimodal(config):
            exclude_unreached(peft_config, config)
            if processing_class is None and isinstance(model, str):
                processing_class = load_processing_class(model, trust_remote_code=args.trust_remote_code)
            if args.ddp_find_unused_parameters is None:
                args.ddp_find_unused_parameters = False  # TRL turns it on for vision towers; here they are not trained
        set_environment(cpu=args.device.type == "cpu")
        graphs = cuda_graphs.LLM_KWARGS[args.engine_cuda_graphs]
        with colocated_vllm(
            max_num_seqs=args.engine_slots,
            dtype=args.engine_dtype,
            rounding_seed=args.seed if args.weight_rounding == "dithered" else None,
            **graphs,
        ):
            super().__init__(
                model=model,
                reward_funcs=functions,
                args=args,
                train_dataset=train_rows,
                eval_dataset=eval_rows,
                processing_class=processing_class,
                peft_config=peft_config,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        freeze_unreached(self.model)
        self.args: PolarGRPOConfig
        self.data_collator: Callable[..., Any]
        self.vllm_generation: ColocatedVllm
        self.vllm_generation.on_merged = self.policy_weights.note_merged
        settings = {
            "model": os.path.abspath(name) if os.path.isdir(name := self.model.name_or_path) else name,
            "agent": harness.name,
            "renderer": args.renderer,
            "max_trajectory_tokens": self._read_longest_row(),
        }
        self.add_callback(MetricsLog(Path(args.output_dir), settings))
        self._engine_checked = False
        self._num_batches = 0
        self._last_loaded_step: int  # TRL's: the step whose weights the engine has
        self._attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{self.accelerator.process_index}"
        self.trained_rows: TrainedRows = TrainedRows(Path(args.output_dir), self._attempt)
        self.completions_table = self._build_completions_table()
        self.proxy = self._build_proxy()
        self.proxy.start()
        self.runner = RolloutRunner(
            proxy=self.proxy,
            backend=backend,
            harness=harness,
            grader=self.grader,
            config=args.build_rollout_config(),
        )
        self.carry_over: CarryOver | None = None
        if args.max_policy_lag:
            self.carry_over = CarryOver(
                self.runner,
                lambda rows: self._build_jobs(rows, "train"),
                max_policy_lag=args.max_policy_lag,
                num_generations=self.num_generations,
            )
        self.upcoming = self._build_upcoming(backend)

    def _build_completions_table(self) -> CompletionsTable | None:
        """Ours in the place of TRL's, where `log_completions` asks for one."""
        self.log_completions: bool = False
        if not self.args.log_completions:
            return None
        table = CompletionsTable(
            Path(self.args.output_dir),
            self.trained_rows.name_record,
            lambda: self.callback_handler.callbacks,
            num_printed=self.num_completions_to_print,
            unique_prompts=self.log_unique_prompts,
        )
        self.add_callback(table)
        return table

    def _build_proxy(self) -> Proxy:
        args = self.args
        renderer = load_renderer(
            self._tokenizer,
            self.model.name_or_path,
            family=args.renderer,
            thinking=args.thinking,
            template_kwargs=args.chat_template_kwargs,
        )
        return Proxy(
            self.vllm_generation.engine,
            renderer,
            params=GenerationParams(
                max_tokens=args.max_completion_length,
                temperature=args.temperature,
                stop_token_ids=tuple(sorted(set(self.eos_token_ids))),
            ),
        )

    def _build_upcoming(self, backend: SandboxBackend) -> UpcomingBatches | None:
        """What looks ahead in the data, if anything wants to know."""
        repeats = self.args.steps_per_generation * self.num_iterations
        if self.carry_over is not None:
            return UpcomingBatches(None, repeats=repeats)  # sessions that begin early order their own sandboxes
        return UpcomingBatches(backend, repeats=repeats) if isinstance(backend, WarmPool) else None

    def close(self) -> None:
        """Stop the proxy and the engine. The model, and what was saved, stay."""
        self.runner.close()
        self.proxy.stop()
        self.runner.backend.close()
        self.vllm_generation.engine.close()

    # From data rows to rows to train.

    def get_train_dataloader(self) -> Any:
        """TRL's, whose collator also notes the batch after the current one."""
        if self.upcoming is None:
            return super().get_train_dataloader()
        collate, self.data_collator = self.data_collator, self.upcoming.wrap(self.data_collator)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def _collect_rows(self, inputs: list[dict[str, Any]], mode: str) -> list[Row]:
        """Roll out and grade one generation batch of this rank (R local rollouts)."""
        self._open_engine(mode)
        with self.phases.measure(mode, "rollouts"):
            data_rows, finished = self._roll_out(inputs, mode)
        completions = [conversation_after_instruction(result.rollout) for result in finished]
        rewards_RF = self._compute_rewards(data_rows, finished, completions)
        advantages = self._compute_advantages(rewards_RF, mode)
        self._require_reward(advantages, finished)
        self._log_rewards(rewards_RF, advantages, mode)
        if mode == "train" and self.args.resample_zero_variance:
            with self.phases.measure(mode, "resampling"):
                finished, advantages = self._resample(finished, rewards_RF, advantages)
        self._close_engine(mode)
        if self.upcoming is not None and mode == "train":
            self.upcoming.finish_rollouts()
        rows, dropped = self._build_rows(finished, advantages, mode)
        self._log_rollouts(finished, rows, dropped, advantages, mode)
        self._log_completions(finished, rewards_RF, advantages, mode)
        return rows

    def _open_engine(self, mode: str) -> None:
        """Weights and memory for the engine, and calls let through (a collective)."""
        self._sync_engine(mode)
        with self.phases.measure(mode, "wake"):
            self.vllm_generation.wake()
        self._check_engine_once(mode)
        self.proxy.release()

    def _close_engine(self, mode: str) -> None:
        """Calls of sessions that stay open wait from here on, and the engine's memory is the trainer's."""
        with self.phases.measure(mode, "sleep"):
            self.proxy.hold()
            self.vllm_generation.sleep()

    def _roll_out(
        self, inputs: list[dict[str, Any]], mode: str
    ) -> tuple[Sequence[dict[str, Any]], list[RolloutResult]]:
        """As many rollouts as there are data rows, and the rows that they are of."""
        if mode == "eval" or self.carry_over is None:
            jobs, shows = self._build_jobs(inputs, mode), self._shows_progress()
            # an evaluation that cuts agents would measure how quick the others were
            return inputs, self.runner.run(jobs, show_progress=shows, cut_stragglers=mode == "train")
        steps_per_batch = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        is_last = self.state.global_step + steps_per_batch >= self.state.max_steps
        next_rows = None if is_last or self.upcoming is None else self.upcoming.next_rows
        return self.carry_over.roll_out(inputs, next_rows, show_progress=self._shows_progress())

    def _resample(
        self, finished: list[RolloutResult], rewards_RF: Tensor, advantages: Advantages
    ) -> tuple[list[RolloutResult], Advantages]:
        """Replace groups of one reward by rollouts of other tasks, for as many rounds as are set (a collective)."""
        size, rank = self.num_generations, self.accelerator.process_index
        num_ranks, finished = self.accelerator.num_processes, list(finished)
        per_rank = len(finished) // size
        num_resampled = 0
        for number in range(self.args.resample_zero_variance):
            empty = advantages.zero_variance_R.view(num_ranks, per_rank, size)[:, :, 0]
            num_new = int(empty.sum(dim=1).max())
            if num_new == 0:
                break
            num_resampled += num_new * num_ranks
            data_rows = [row for row in self._draw_rows(num_new, number) for _ in range(size)]
            results = self.runner.run(self._build_jobs(data_rows, "train"), show_progress=self._shows_progress())
            completions = [conversation_after_instruction(result.rollout) for result in results]
            new_rewards_RF = self._compute_rewards(data_rows, results, completions)
            usable = ~self._compute_advantages(new_rewards_RF, "train").zero_variance_R
            # every rank replaces alike in the rewards of all, and its own rollouts
            for owner in range(num_ranks):
                old_groups = empty[owner].nonzero()[:, 0].tolist()
                new_groups = usable.view(num_ranks, num_new, size)[owner, :, 0].nonzero()[:, 0].tolist()
                for old, new in zip(old_groups, new_groups, strict=False):  # as many as can be
                    target, source = (owner * per_rank + old) * size, (owner * num_new + new) * size
                    rewards_RF[target : target + size] = new_rewards_RF[source : source + size]
                    if owner == rank:
                        finished[old * size : (old + 1) * size] = results[new * size : (new + 1) * size]
            advantages = self._compute_advantages(rewards_RF, "train")
        self._metrics["train"]["polar/resampled_groups"].append(num_resampled)
        return finished, advantages

    def _draw_rows(self, num_rows: int, number: int) -> list[dict[str, Any]]:
        """Data rows of this rank for a round of resampling; other ranks draw others."""
        seed = hash((self.args.seed, self.state.global_step, number)) % 2**32  # of integers: the same in all processes
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        first = self.accelerator.process_index * num_rows
        return [self.train_dataset[order[(first + index) % len(order)]] for index in range(num_rows)]

    def _build_rows(
        self, finished: list[RolloutResult], advantages: Advantages, mode: str
    ) -> tuple[list[Row], Counter[str]]:
        """What of this rank's rollouts is trained, and sampled tokens that are not, by reason."""
        first = self.accelerator.process_index * len(finished)
        local = slice(first, first + len(finished))
        results, described, dropped = [], [], Counter[str]()
        for result, reward, advantage, scored, zero_variance in zip(
            finished,
            advantages.rewards_R[local].tolist(),
            advantages.advantages_R[local].tolist(),
            advantages.scored_R[local].tolist(),
            advantages.zero_variance_R[local].tolist(),
            strict=True,
        ):
            reason = None
            if not scored:
                reason = "no_reward"  # law 4: without a reward, no gradient
            elif zero_variance and self.args.drop_zero_variance and mode == "train":
                reason = "zero_variance"
            if reason is None:
                results.append((result, advantage))
            else:
                dropped[reason] += sum(sum(trajectory.trainable) for trajectory in result.reconstruction.trajectories)
            record = self.trained_rows.name_record(result.record_path)
            described.append(describe_rollout(result.rollout, record, reward, advantage, dropped=reason))
        self.trained_rows.write_rollouts(mode, self.state.global_step + (mode == "train"), described)
        rows, others = build_rows(
            results,
            max_tokens=self._read_longest_row(),
            oldest_version=self.vllm_generation.engine.policy_version - self.args.max_policy_lag,
            name_record=self.trained_rows.name_record,
        )
        return rows, dropped + others

    def _read_longest_row(self) -> int:
        """Tokens of a row, by the setting or by the positions that the trained model has."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return self.args.max_trajectory_tokens or positions or self.vllm_generation.engine.max_model_len

    def _sync_engine(self, mode: str) -> None:
        """Give the engine the trainer's weights if they have changed since (a collective)."""
        generation = self.vllm_generation
        is_new = self.state.global_step != self._last_loaded_step  # weights that were only asleep are no new policy
        if is_new or generation._llm_weights_sleeping:
            with self.phases.measure(mode, "weight_sync"):
                generation.sync_weights(new_policy=is_new)
            self._last_loaded_step = self.state.global_step
        if is_new:
            for name, value in self.policy_weights.measure_push(generation.engine_dtype, self.accelerator).items():
                self._metrics["train"][name].append(value)  # also where an evaluation comes before the next step

    def _check_engine_once(self, mode: str) -> None:
        """Before the first rollout: does the engine compute what the trainer computes?"""
        if self._engine_checked:
            return
        prompts = [self._tokenizer(text)["input_ids"] for text in _PROBES]
        engine = self.vllm_generation.engine
        dtypes = (engine.dtype, self.vllm_generation.pass_dtype)
        self.model.eval()
        gap = check_engine(engine, self._score_tokens, prompts, temperature=self.temperature, dtypes=dtypes)
        self.model.train(mode == "train")
        self._metrics[mode]["polar/engine_check_gap"].append(gap)
        self._engine_checked = True

    @torch.no_grad()
    def _score_tokens(self, prompt: list[int], token_ids: list[int]) -> Tensor:
        """[C] log-probabilities, by the pass that trains."""
        sampled = np.array([False] * len(prompt) + [True] * len(token_ids))
        ids = np.array(prompt + token_ids, dtype=np.int64)
        packed = pack_rows([ids], [sampled], kind=self.layout_kind, device=self.accelerator.device)
        with self.accelerator.autocast():
            return score(self.model, packed)[0]

    def _build_jobs(self, inputs: Sequence[dict[str, Any]], mode: str) -> list[Job]:
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        folder = Path(self.args.output_dir) / "sessions" / self._attempt / f"{mode}_{self._num_batches:05d}"
        self._num_batches += 1
        jobs = []
        for local_index, row in enumerate(inputs):
            index = self.accelerator.process_index * len(inputs) + local_index
            group = f"{mode}-{self._num_batches - 1:05d}-g{index // num_generations:03d}"
            rollout_id = f"{group}-r{index % num_generations:03d}"
            jobs.append(
                Job(
                    rollout_id=rollout_id,
                    group_id=group,
                    task=parse_task(row),
                    record_path=folder / f"{rollout_id}.jsonl",
                )
            )
        return jobs

    def _compute_rewards(
        self, data_rows: Sequence[dict[str, Any]], finished: list[RolloutResult], completions: list[Any]
    ) -> Tensor:
        """[R, F] rewards of all ranks' rollouts, NaN where there is none (a collective).

        A rollout for which one function gave a number that is not finite has no reward of any.
        """
        prompts = [row["prompt"] for row in data_rows]
        completion_ids = [
            [i for call in result.rollout.calls for i in call.completion.token_ids] for result in finished
        ]
        rows = [{**row, "rollouts": result.rollout} for row, result in zip(data_rows, finished, strict=True)]
        with without_trl_warning():
            rewards_RF: Tensor = self._calculate_rewards(rows, prompts, completions, completion_ids)
        # Law 4: where the infrastructure failed or the grader could not decide, no reward function may do so instead.
        failed = torch.tensor([result.rollout.error is not None for result in finished], device=rewards_RF.device)
        failed_R = self.accelerator.gather(failed)
        not_finite_RF = find_not_finite(rewards_RF, self.reward_funcs)
        not_finite_RF[failed_R] = False
        self._num_not_finite += int(not_finite_RF.any(dim=1).sum())
        first = self.accelerator.process_index * len(finished)
        local = slice(first, first + len(finished))
        warn_not_finite([result.rollout.id for result in finished], self.reward_func_names, not_finite_RF[local])
        rewards_RF[failed_R | not_finite_RF.any(dim=1)] = torch.nan
        if self.completions_table is not None:
            self.completions_table.note(prompts, finished, completions, self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return rewards_RF

    def _compute_advantages(self, rewards_RF: Tensor, mode: str) -> Advantages:
        return compute_advantages(
            rewards_RF,
            self.reward_weights.to(rewards_RF.device),
            num_generations=self.num_generations if mode == "train" else self.num_generations_eval,
            scale_rewards=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
        )

    def _require_reward(self, advantages: Advantages, finished: list[RolloutResult]) -> None:
        if not advantages.scored_R.any() and self.state.global_step == 0:
            reasons = Counter(result.rollout.error for result in finished if result.rollout.error).most_common(1)
            why = reasons[0][0] if reasons else "the reward functions gave none, or none that is finite"
            raise ConfigError(f"no rollout of the first batch has a reward; most often: {why}")

    # Logging.

    def _log_rewards(self, rewards_RF: Tensor, advantages: Advantages, mode: str) -> None:
        """TRL's reward metrics, and those that reward functions logged through TRL's `log_metric` (a collective)."""
        metrics = self._metrics[mode]
        for name, column in zip(self.reward_func_names, rewards_RF.T, strict=True):
            metrics[f"rewards/{name}/mean"].append(torch.nanmean(column).item())
            metrics[f"rewards/{name}/std"].append(nan_std(column))
        metrics["reward"].append(torch.nanmean(advantages.rewards_R).item())
        metrics["reward_std"].append(nan_std(advantages.rewards_R))
        metrics["frac_reward_zero_std"].append(advantages.zero_variance_R.float().mean().item())
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = gather_object(self._pending_metrics.get(name, []))
            metrics[name].append(sum(values) / len(values))
        self._pending_metrics.clear()

    def _log_completions(
        self, finished: list[RolloutResult], rewards_RF: Tensor, advantages: Advantages, mode: str
    ) -> None:
        """This rank's part of the table of completions (a collective)."""
        if self.completions_table is None:
            return
        first = self.accelerator.process_index * len(finished)
        local = slice(first, first + len(finished))
        names = zip(self.reward_func_names, rewards_RF.T, strict=True)
        self.completions_table.add(
            mode,
            self.state.global_step + (mode == "train"),
            finished,
            {f"rewards/{name}": column[local].tolist() for name, column in names},
            advantages.rewards_R[local].tolist(),
            advantages.advantages_R[local].tolist(),
        )

    def _log_rollouts(
        self, finished: list[RolloutResult], rows: list[Row], dropped: Counter[str], advantages: Advantages, mode: str
    ) -> None:
        """Counts and times of a generation batch, over all ranks (a collective)."""
        summaries: list[dict[str, float]] = gather_object([count_rollout(result) for result in finished])
        lengths: list[int] = gather_object([len(row.token_ids_T) for row in rows])
        metrics = self._metrics[mode]
        figures = build_rollout_metrics(summaries)
        for reason, count in sorted(sum(gather_object([dropped]), Counter()).items()):
            figures[f"polar/dropped/{reason}"] = figures.get(f"polar/dropped/{reason}", 0) + count
        append_metrics(metrics, figures)
        metrics["polar/rollouts_without_reward"].append(int((~advantages.scored_R).sum()))
        num_not_finite = self._num_not_finite + int(advantages.overflowed_R.sum())
        num_not_finite += int(sum(summary.get("counters/rewards_not_finite", 0) for summary in summaries))
        metrics["polar/rewards_not_finite"].append(num_not_finite)
        self._num_not_finite = 0
        if mode == "train":
            self.state.num_input_tokens_seen += sum(lengths)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def _shows_progress(self) -> bool:
        return self.args.show_rollout_progress and self.accelerator.is_main_process and not self.args.disable_tqdm


_PROBES = ("The quick brown fox jumps over", "def add(a, b):\n    return", "1, 2, 3, 4,")
