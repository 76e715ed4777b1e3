"""TRL's GRPO trainer, with agents in place of `generate`.

TRL keeps the optimizer, checkpoints, PEFT and logging. `step.py` is a training step, top to bottom; this file builds
its parts and passes on what transformers' loop calls.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from polar_trl.engine import cuda_graphs
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import ColocatedVllm, colocated_vllm, set_environment
from polar_trl.grade.base import Grader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import (
    TaskSource,
    build_dataset,
    build_eval_dataset,
    is_built,
    merge_sets,
    read_eval_sets,
    read_tasks,
)
from polar_trl.grpo.logs.completions_table import CompletionsTable
from polar_trl.grpo.logs.evaluations import list_evaluations
from polar_trl.grpo.logs.library_log import LibraryLog
from polar_trl.grpo.logs.metrics_log import MetricsLog
from polar_trl.grpo.logs.rollout_log import RolloutLog
from polar_trl.grpo.logs.settings_log import SettingsLog
from polar_trl.grpo.logs.terminal import REPLACED, StepLines, describe_run
from polar_trl.grpo.logs.trained_log import TrainedLog
from polar_trl.grpo.logs.trained_rows import TrainedRows
from polar_trl.grpo.multimodal import freeze_unreached, prepare_multimodal
from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.preflight import (
    describe_agent,
    find_parts,
    read_model_config,
    require_a_step,
    require_config,
    require_harness,
    require_tasks,
)
from polar_trl.grpo.resume.checkpoint import list_run_files
from polar_trl.grpo.resume.hub import WithModelCard, refuse_uploads
from polar_trl.grpo.resume.resume import Resume, digest_texts
from polar_trl.grpo.reward_funcs import RewardFunction, list_reward_functions, match_processing_classes
from polar_trl.grpo.rewards import Rewards
from polar_trl.grpo.rollouts.distributed import connect_ranks
from polar_trl.grpo.rollouts.source import RolloutSource
from polar_trl.grpo.rows import Row
from polar_trl.grpo.run.best import BestCheckpoint
from polar_trl.grpo.run.finish import explain_resume, finish_run
from polar_trl.grpo.run.machines import failing_together, own_output_dir, require_same_run
from polar_trl.grpo.run.open_parts import take_over
from polar_trl.grpo.step import SessionRows
from polar_trl.grpo.trl_arguments.refused import refuse_arguments
from polar_trl.grpo.turns import load_turn_choice
from polar_trl.grpo.weights.engine_sync import EngineSync
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import list_mixed, require_agents
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import RolloutRunner
from polar_trl.run_folder import disk_errors
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Task


class PolarGRPOTrainer(WithModelCard, PackedGRPOTrainer):
    """GRPO on the sessions of an unmodified coding agent.

    Arguments before `harness` are `GRPOTrainer`'s, in its order; docs/trl-arguments.md says which of them differ.

    Args:
        model: Path or hub id, or a model loaded from one (`name_or_path` must lead the engine to the same weights).
        reward_funcs: TRL reward functions: callables (async, too), "module.function", names of TRL's own, reward
            models. They come after the grader in `args.reward_weights`, and are called with lists of one entry per
            rollout: `prompts`, `completions` (the conversation after the instruction; of a prompt that is text, the
            last answer's), `completion_ids` (all sampled tokens), every column of the data set, `task` (each
            rollout's `Task`) and `rollouts`.
        args: Settings of the run. None: the defaults, in a folder named by the model.
        train_dataset: Tasks; or a `Dataset` whose columns are `Task`'s fields, or TRL's, with a `prompt`.
        eval_dataset: The same, or several by name, whose metrics are then `eval_NAME_...`.
        harness: The agent; a `MixedHarness` of several. Evaluations are then of each set inside each agent.
        sandbox: Where agents run; by default in bubblewrap, or containers where a task names an image. Sandboxes of a
            `WarmPool` are made while the model trains.
        grader: Gives a session its reward. By default each task's own (a command, hidden tests, a verifier); if no
            task has one, `reward_funcs` decide alone.

    Raises:
        ConfigError: arguments, settings or tasks that cannot work, before anything is loaded where possible.
        SandboxError: the default sandboxes do not work on this machine; says what to do.
        EngineError: the engine does not compute what the trainer computes.
        LawError: a law of the design is broken.
    """

    _tag_names = ["trl", "grpo", "polar"]  # noqa: RUF012 - TRL's own declaration
    args: PolarGRPOConfig
    data_collator: Callable[..., Any]
    vllm_generation: ColocatedVllm
    _eval_set = ""
    """Name of the evaluation set that runs, if there are several."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: PolarGRPOConfig | None = None,
        train_dataset: TaskSource | None = None,
        eval_dataset: TaskSource | Mapping[str, TaskSource] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        harness: Harness | None = None,
        sandbox: SandboxBackend | None = None,
        grader: Grader | None = None,
    ) -> None:
        refuse_arguments(quantization_config, tools, rollout_func, environment_factory)
        harness = require_harness(harness)
        args = require_config(model, args)
        config = _read_config(model, args)
        eval_sets = read_eval_sets(eval_dataset)
        tasks = {"train": read_tasks(train_dataset), "eval": merge_sets(eval_sets)}
        all_tasks = require_tasks(tasks)
        require_agents(harness, all_tasks, **args.endpoint_limits)
        self._choose_turns = load_turn_choice(args.train_turns)
        backend, grader = find_parts(harness, all_tasks, sandbox=sandbox, grader=grader)
        functions = list_reward_functions(grader, reward_funcs, args.reward_weights)
        reward_processing_classes = match_processing_classes(reward_processing_classes, functions, grader)
        require_a_step(len(tasks["train"]), args)
        refuse_uploads(args)
        own_output_dir(args)
        with failing_together():
            harness.install()
        instructions = digest_texts(f"{task.id}\n{task.instruction}" for task in all_tasks)
        require_same_run(args, **describe_agent(harness), instructions=instructions)
        processing_class = prepare_multimodal(model, config, args, peft_config, processing_class)
        train_dataset = build_dataset(tasks["train"] or tasks["eval"])  # TRL wants one for an evaluation, too
        self._began = time.monotonic()
        self._open, self._libraries = take_over(self, but=backend), LibraryLog(Path(args.output_dir))
        with self._libraries.everything(), _colocated(args):
            super().__init__(
                model=model,
                reward_funcs=functions,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=build_eval_dataset(eval_sets, list_mixed(harness)),
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        if not tasks["train"]:
            self.train_dataset = None
        self._start(backend, harness, grader, tasks)

    def _start(
        self, backend: SandboxBackend, harness: Harness, grader: Grader | None, tasks: Mapping[str, dict[str, Task]]
    ) -> None:
        """Start the proxy on TRL's engine, and build what runs sessions and trains on them."""
        self._open.add(self.vllm_generation, self.vllm_generation.close)
        self._open.add(backend, backend.close)
        config = self.args.build_rollout_config()
        try:
            freeze_unreached(self.model)
            self.vllm_generation.on_merged = self.policy_weights.note_merged
            with self._libraries.everything():
                self.proxy = self._build_proxy()
            self.proxy.start()
            self._open.add(self.proxy, self.proxy.stop)
            ranks = connect_ranks(self.accelerator.num_processes, timeout_s=self.args.ddp_timeout)
            runner = RolloutRunner(
                proxy=self.proxy, backend=backend, harness=harness, grader=grader, config=config, ranks=ranks
            )
            self._open.add(runner, runner.close)
            self._build_parts(runner, tasks, harness=harness, has_grader=grader is not None)
            self.add_callback(BestCheckpoint(Path(self.args.output_dir), self.eval_dataset))
        except BaseException:
            self.close()
            raise

    def _build_parts(
        self, runner: RolloutRunner, tasks: Mapping[str, dict[str, Task]], *, harness: Harness, has_grader: bool
    ) -> None:
        """Build what a step is made of, in the order of `step.py`."""
        args, run = self.args, Path(self.args.output_dir)
        process_run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{self.accelerator.process_index}"
        self.engine_sync = EngineSync(
            self.accelerator,
            self.trl,
            generation=self.vllm_generation,
            proxy=self.proxy,
            policy_weights=self.policy_weights,
            phases=self.phases,
            layout_kind=self.layout_kind,
            temperature=self.temperature,
        )
        self.rollouts = RolloutSource(
            args,
            self.accelerator,
            self.trl,
            runner=runner,
            tasks=tasks,
            num_generations={"train": self.num_generations, "eval": self.num_generations_eval},
            folder=run / "sessions" / process_run,
        )
        trained_rows = TrainedRows(run, process_run)
        table = self._build_completions_table(run, trained_rows)
        self.rewards = Rewards(self, self.trl, has_grader=has_grader, tasks=tasks, table=table)
        self.session_rows = SessionRows(
            args,
            self.trl,
            engine=self.engine_sync,
            rollouts=self.rollouts,
            rewards=self.rewards,
            log=RolloutLog(self.trl, self.rollouts.rank, rewards=self.rewards, trained_rows=trained_rows, table=table),
            phases=self.phases,
            max_tokens=self._read_longest_row(),
            choose_turns=self._choose_turns,
        )
        self.step_loss.trained_rows = trained_rows
        self.step_loss.agents = self.session_rows.log.agents = list_mixed(harness)
        self.step.trained_log = TrainedLog(run)
        self.resume = Resume(
            args,
            self.accelerator,
            self.trl,
            layout_kind=self.layout_kind,
            step=self.step,
            rollouts=self.rollouts,
            engine=self.vllm_generation.engine,
            policy_weights=self.policy_weights,
            is_used=bool(list_run_files(run)),
        )
        for replaced in REPLACED:
            self.remove_callback(replaced)
        lines = StepLines(describe_run(len(tasks["train"]), self.num_generations, run, self._libraries.path))
        self.settings_log = SettingsLog(run, self._describe_run(harness, tasks), args)
        logs = (self.step.trained_log, self.settings_log, MetricsLog(run), table, lines, self.session_rows.log.lessons)
        for callback in filter(None, logs):
            self.add_callback(callback)

    def _build_completions_table(self, run: Path, trained_rows: TrainedRows) -> CompletionsTable | None:
        if not self.args.log_completions:
            return None
        self.log_completions = False  # TRL's own table is of single completions
        return CompletionsTable(
            run,
            trained_rows.name_record,
            lambda: self.callback_handler.callbacks,
            num_printed=self.num_completions_to_print,
            unique_prompts=self.log_unique_prompts,
        )

    def _build_proxy(self) -> Proxy:
        args = self.args
        renderer = load_renderer(
            self.trl.tokenizer,
            self.model.name_or_path,
            family=args.renderer,
            thinking=args.thinking,
            template_kwargs=args.chat_template_kwargs,
            end_ids=self.eos_token_ids,
        )
        params = GenerationParams(max_tokens=args.max_completion_length, temperature=args.temperature)
        return Proxy(self.vllm_generation.engine, renderer, params=params)

    def _describe_run(self, harness: Harness, tasks: Mapping[str, Mapping[str, Task]]) -> dict[str, Any]:
        """Return what `settings.json` says of the run besides its arguments."""
        name = self.model.name_or_path
        return {
            "model": os.path.abspath(name) if os.path.isdir(name) else name,
            **describe_agent(harness),
            "renderer": self.args.renderer,
            "max_trajectory_tokens": self._read_longest_row(),
            "train_turns": self.args.train_turns,
            "num_tasks": len(tasks["train"]),
            "num_eval_tasks": len(tasks["eval"]),
        }

    def _read_longest_row(self) -> int:
        """Tokens of a row, by the setting or by the positions that the trained model has."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return self.args.max_trajectory_tokens or positions or self.vllm_generation.engine.max_model_len

    def close(self) -> None:
        """Stop sessions, proxy, sandboxes and engine; the model stays. The same happens at the end of a `with`, of
        the process, and before another trainer is built. May be called twice."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train, from the beginning or from a checkpoint; save the model unless `save_strategy` is "no".

        With `eval_on_start` and evaluation tasks, an evaluation comes at the end, too, unless the best model was
        loaded, and the two are compared.

        Args:
            resume_from_checkpoint: "auto" or True goes on from the newest complete checkpoint of `output_dir`, or
                begins if there is none; a path goes on from that one; None begins.

        Raises:
            ConfigError: the checkpoint is not whole, the settings would change the order of tasks, or a run would
                begin in the folder of another.
            DiskError: a disk is full. What was written stays readable, and "auto" goes on once there is room.
            KeyboardInterrupt: what runs is closed, and another trainer goes on from the newest checkpoint.
        """
        run = Path(self.args.output_dir)
        self._open.require()
        with disk_errors(run), self._libraries.logged():
            folder = self.resume.begin(resume_from_checkpoint)
            try:
                output = super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)
                self._finish(run)
            except KeyboardInterrupt as stop:
                stop.add_note(f"stopped at step {self.state.global_step}; {explain_resume(run)}")
                self.close()
                raise
        return output

    def _finish(self, run: Path) -> None:
        """Evaluate, save and summarize a run that made all of its steps."""
        evaluated = [entry["step"] for entry in list_evaluations(self.state.log_history)]
        # a model that was loaded at the end is not the last step's
        has_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        is_due = self.args.eval_on_start and not has_best and self.state.global_step not in evaluated
        if is_due and self.eval_dataset:
            self.evaluate()
        is_saved = self.args.save_strategy != "no"
        if is_saved:
            self.save_model()  # with a card that has the evaluation
        if self.accelerator.is_main_process:
            tasks = self.rollouts.tasks
            finish_run(
                run,
                self.state.log_history,
                self.args,
                seconds=self.resume.seconds_before + time.monotonic() - self._began,
                is_saved=is_saved,
                is_held_out=not tasks["eval"].keys() & tasks["train"].keys(),
            )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as transformers does, on the trainer's sets or on others of the same forms.

        Raises `ConfigError` for a data set that cannot be read, or if the trainer is closed.
        """
        self._open.require()
        if not (eval_dataset is None or isinstance(eval_dataset, str) or is_built(eval_dataset)):
            sets = read_eval_sets(eval_dataset)
            require_agents(self.rollouts.runner.harness, list(merge_sets(sets).values()))
            merge_sets({None: self.rollouts.tasks["eval"], **sets})
            self.rollouts.tasks["eval"].update(merge_sets(sets))
            eval_dataset = build_eval_dataset(sets, list_mixed(self.rollouts.runner.harness))
        self._eval_set = metric_key_prefix.removeprefix("eval").removeprefix("_")
        with self._libraries.logged():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with how many tasks an evaluation solved; metrics of one of several sets are `eval_NAME_...`."""
        logs.update(self.session_rows.log.evaluations.take_figures(logs))
        if self._eval_set and not self.model.training:
            self.trl.name_metrics("eval", f"{self._eval_set}_")
        super().log(logs, start_time)

    def _collect_rows(self, inputs: list[dict[str, Any]], mode: str) -> list[Row]:
        return self.session_rows.collect(inputs, mode)

    # What transformers' loop calls beside steps.

    def get_train_dataloader(self) -> Any:
        """TRL's, whose collator also notes the batch after the current one."""
        if self.rollouts.upcoming is None:
            return super().get_train_dataloader()
        collate, self.data_collator = self.data_collator, self.rollouts.upcoming.wrap(self.data_collator)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self.resume.skip_shuffles(super()._get_train_sampler(dataset))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Stop a run that is over: transformers would make one more step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        self.resume.save(trial, lambda: save(model, trial))

    def _finalize_training(self, *args: Any) -> Any:
        with self.resume.without_limit():  # transformers would remove the last checkpoint, unless it is the best
            output = super()._finalize_training(*args)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self.resume.take_best()
        return output


def _colocated(args: PolarGRPOConfig) -> AbstractContextManager[None]:
    """Have TRL build the engine with our settings inside the block."""
    set_environment(cpu=args.device.type == "cpu")
    return colocated_vllm(
        max_num_seqs=args.engine_slots,
        dtype=args.engine_dtype,
        rounding_seed=args.seed if args.weight_rounding == "dithered" else None,
        **cuda_graphs.LLM_KWARGS[args.engine_cuda_graphs],
        **cast(dict[str, Any], args.engine_kwargs or {}),
    )


def _read_config(model: Any, args: PolarGRPOConfig) -> Any:
    if model is None or isinstance(model, str):
        return read_model_config(model, trust_remote_code=args.trust_remote_code)
    return model.config
