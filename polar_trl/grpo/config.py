"""Define the settings of a run: TRL's `GRPOConfig`, a few defaults changed for agents, and those of rollouts.

Settings under which the trained distribution would not be the sampled one raise `ConfigError`.
"""

from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal

import torch
from trl import GRPOConfig

from polar_trl.engine.cuda_graphs import CudaGraphs, check_cuda_graphs
from polar_trl.engine.llm_kwargs import check_engine_kwargs
from polar_trl.errors import ConfigError
from polar_trl.grpo.credit.turn_credit import TURN_CREDITS
from polar_trl.grpo.run.machines import choose_interface
from polar_trl.grpo.trl_arguments.refused import refuse_model_kwargs, refuse_settings
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import RolloutConfig
from polar_trl.user_code import is_object_name

# TRL's, but for `bnpo`; tests/grpo/loss/test_token_loss.py holds all that is listed here against TRL (law 5)
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
IMPORTANCE_LEVELS = ("token", "sequence")
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

BEST_METRIC = "reward"
"""`metric_for_best_model` of a run that evaluates. transformers' own is the loss, which in GRPO says nothing."""
_BY_LOSS = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow `metric_for_best_model` down."""


@dataclass
class PackedGRPOConfig(GRPOConfig):
    """Arguments of `PackedGRPOTrainer`: TRL's `GRPOConfig`, and how rows become forward passes."""

    max_tokens_per_device: int = field(
        default=32768,
        metadata={
            "help": "Tokens of one forward and backward pass. A longer row runs alone. Memory grows with it; see "
            "polar-trl plan."
        },
    )
    sequence_layout: Literal["tree", "packed", "single"] | None = field(
        default=None,
        metadata={
            "help": "How rows are forwarded: 'tree' (one flat sequence, prefixes that rows share once), 'packed' (one "
            "flat sequence, every row whole) or 'single' (a pass for each row; any model). None: the first of these "
            "that the model allows."
        },
    )

    checkpointed_layers: int | None = field(
        default=None,
        metadata={
            "help": "Decoder layers, the first ones, that are computed again in the backward pass instead of keeping "
            "their activations, with gradient_checkpointing: true. None: as few as each pass needs to fit into the "
            "GPU's free memory (on a CPU all)."
        },
    )
    weight_rounding: Literal["dithered", "nearest"] = field(
        default="dithered",
        metadata={
            "help": "How float32 weights become the half-precision ones that compute, in the pass and in the "
            "engine alike: 'dithered' adds a random offset per weight, fixed for the run, so that the policy moves as "
            "the weights do; with 'nearest' steps of 1e-6 are not seen for dozens of steps."
        },
    )
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": "TRL's loss types but 'bnpo', those that average over rows averaging over rollouts; 'per_rollout' "
            "is another name for that mean of TRL's 'grpo'."
        },
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "How the ratio of training to sampling policy is bounded. TRL's own default sums it over a whole "
            "sequence (here a rollout), which masks nearly every long agent session and costs a forward pass more."
        },
    )

    def __post_init__(self) -> None:
        choose_interface()  # transformers connects the ranks below
        if self.bf16 is None and (self.use_cpu or not torch.cuda.is_available()):  # type: ignore[has-type]
            self.bf16 = False  # TRL's True ends in an error without a GPU, and is slow on a CPU
        if self.loss_type == "per_rollout":
            # what TRL calls "grpo", of which token_shares makes a mean over rollouts
            self.loss_type = "grpo"
        self._require(
            self.loss_type != "bnpo",
            "loss_type",
            "must not divide by the tokens of a forward pass, into which rows fall by their sizes; 'dapo' divides by "
            "those of the step",
        )
        self._require_one_of("loss_type", LOSS_TYPES)
        self._require_one_of("importance_sampling_level", IMPORTANCE_LEVELS)
        self._require_one_of("vllm_importance_sampling_mode", CORRECTION_MODES)
        super().__post_init__()
        if self.n_gpu > 1:  # transformers would spread each batch over them by itself
            raise ConfigError(
                f"this process sees {self.n_gpu} GPUs, and trains on one: start a process for each (polar-trl train "
                "RUN --accelerate ddp_8gpu, or accelerate launch), or set CUDA_VISIBLE_DEVICES=0"
            )
        self._require(self.max_tokens_per_device >= 1, "max_tokens_per_device", "must be at least 1")
        layers = self.checkpointed_layers
        self._require(layers is None or layers >= 0, "checkpointed_layers", "must be 0 or more, or left out")
        self._require(
            self.sequence_layout in (None, "tree", "packed", "single"),
            "sequence_layout",
            "must be 'tree', 'packed', 'single', or left out",
        )
        self._require_one_of("weight_rounding", ("dithered", "nearest"))
        self._require(
            not any(kind in str(self.optim).lower() for kind in ("schedule_free", "layerwise", "lomo")),
            "optim",
            "must change weights in its step and nowhere else: those that compute are rounded after it",
        )
        for setting in fields(self):
            value = getattr(self, setting.name)
            self._require(not isinstance(value, float) or isfinite(value), setting.name, "must be a finite number")
        share = self.top_entropy_quantile
        self._require(0 < share <= 1, "top_entropy_quantile", "must be above 0 and at most 1")
        if self.loss_type == "vespo":
            why = "with loss_type='vespo', which weighs whole rollouts by itself"
            self._require(
                self.importance_sampling_level == "token", "importance_sampling_level", f"must be 'token' {why}"
            )
            self._require(
                not self.vllm_importance_sampling_correction
                or self.vllm_importance_sampling_mode in ("token_truncate", "token_mask"),
                "vllm_importance_sampling_mode",
                f"must be 'token_truncate' or 'token_mask' {why}",
            )

    def _require_one_of(self, name: str, choices: tuple[str, ...]) -> None:
        self._require(getattr(self, name) in choices, name, f"must be one of {', '.join(sorted(choices))}")

    def _require(self, holds: Any, name: str, message: str) -> None:
        if not holds:
            raise ConfigError(f"{name} {message} (it is {getattr(self, name)!r})")


@dataclass
class PolarGRPOConfig(PackedGRPOConfig):
    """Arguments of `PolarGRPOTrainer`. Everything of TRL's `GRPOConfig` applies; these are added or differ.

    `max_completion_length` bounds one model call; a session makes many. `per_device_train_batch_size` and
    `gradient_accumulation_steps` count rollouts; a rollout may become several rows.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "engine_kwargs"]

    logging_steps: float = field(
        default=1, metadata={"help": "Steps from one line of the log to the next; a step takes minutes here."}
    )
    max_completion_length: int = field(
        default=4096,
        metadata={"help": "Tokens of one answer of the model, of which a session has many; a file is written in one."},
    )
    use_vllm: bool = field(
        default=True,
        metadata={"help": "TRL's key; always on, since agents are served by the engine, which shares this process."},
    )
    max_agents: int = field(default=16, metadata={"help": "Agents that run at the same time, per process."})
    max_preparing: int = field(default=4, metadata={"help": "Sandboxes prepared at the same time, per process."})
    max_grading: int = field(default=4, metadata={"help": "Sessions graded at the same time, per process."})
    max_session_calls: int = field(
        default=200, metadata={"help": "Model calls a session may make; later ones get a final message, not trained."}
    )
    max_session_tokens: int | None = field(
        default=None, metadata={"help": "Tokens a session may sample in all; None sets no limit."}
    )
    train_auxiliary: bool = field(
        default=False,
        metadata={
            "help": "Train what an agent asks beside its task like the rest: titles, but also the summaries that a "
            "compacted session goes on from."
        },
    )
    renderer: str | None = field(
        default=None,
        metadata={
            "help": "Chat format: a family that the package `renderers` knows, or 'template' for the tokenizer's own "
            "chat template. None: recognised by the model's chat template."
        },
    )
    thinking: Literal["keep", "template"] = field(
        default="keep",
        metadata={
            "help": "Where the chat template drops earlier reasoning once a new user turn begins: 'keep' continues "
            "from the sampled tokens, 'template' renders anew and starts another trajectory."
        },
    )
    train_turns: str = field(
        default="all",
        metadata={
            "help": "Which of a session's model calls are trained: 'all', 'last', or 'package.module:function', which "
            "is given a Rollout and returns indices of its calls. The others are context (counted as not_chosen)."
        },
    )
    turn_credit: Literal["none", "by_turn", "return_to_go"] = field(
        default="none",
        metadata={
            "help": "Use rewards of single calls, which a grader may give beside the session's: 'by_turn' normalizes "
            "them over the group's calls of the same number, 'return_to_go' credits a call with what comes after it. "
            "See docs/rewards.md."
        },
    )
    turn_credit_weight: float = field(
        default=1.0, metadata={"help": "Weight of rewards of calls beside those of sessions, with turn_credit."}
    )
    cut_sessions: Literal["train", "mask", "leave_out"] = field(
        default="train",
        metadata={
            "help": "Sessions that a limit ended, of time, calls, tokens or of their last answer: 'train' them like "
            "others, 'mask' them (their rewards count in the baseline, their tokens are not trained), or 'leave_out' "
            "both. A task may say otherwise."
        },
    )
    drop_zero_variance: bool = field(
        default=True,
        metadata={
            "help": "Leave out groups whose rollouts all have one reward: they have no gradient, and would only count "
            "in the loss's denominator."
        },
    )
    resample_zero_variance: int = field(
        default=0,
        metadata={"help": "Rounds in which groups of one reward are replaced by rollouts of other tasks; 0: none."},
    )
    straggler_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Once this share of a batch's agents has ended, those that have used as much time as the slowest "
            "of them are stopped, graded and trained; the rest may use as much. None: wait for all. A simulated step "
            "takes a third less time at 0.9, but hard tasks are the ones that are stopped."
        },
    )
    retry_lost_sessions: bool = field(
        default=False,
        metadata={
            "help": "Begin a session once more, on another node, where its node of sandbox_cluster was lost. Else it "
            "has no reward."
        },
    )
    max_policy_lag: int = field(
        default=0,
        metadata={
            "help": "Changes of the engine's weights (one per generation batch) that a session may stay open over. 0: "
            "every session of a batch ends before it is trained; above, unfinished ones wait for the new weights."
        },
    )
    max_trajectory_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longer trajectories are truncated after the last call that fits. None: the model's context."
        },
    )
    engine_max_num_seqs: int | None = field(
        default=None, metadata={"help": "Requests the engine samples at once; None: four per agent, 256 at most."}
    )
    engine_dtype: Literal["bfloat16", "float16", "float32"] | None = field(
        default=None,
        metadata={
            "help": "What the engine computes in. None: as the trainer's pass (bf16, fp16, or else the weights' "
            "dtype), and on a CPU float32, or bfloat16 for Qwen3.5."
        },
    )
    engine_cuda_graphs: CudaGraphs = field(
        default="default",
        metadata={
            "help": "CUDA graphs of the engine: 'default' is vLLM's own choice (FULL_AND_PIECEWISE and torch.compile, "
            "slow to start), 'decode' is FULL_DECODE_ONLY without torch.compile (quick to start), 'none' is eager, "
            "for a card on which graphs do not compute what the trainer computes. vLLM's mode FULL is refused: it "
            "gives wrong text. A CPU has none."
        },
    )
    engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments that are passed on to vllm.LLM: kv_cache_dtype ('fp8': twice the histories fit, and "
            "the gap grows), kv_cache_memory_bytes, speculative_config (n-gram drafts, which are exact)."
        },
    )
    show_rollout_progress: bool = field(default=True, metadata={"help": "Draw a bar of sessions by stage."})

    def __post_init__(self) -> None:
        refuse_settings(self)
        if self.eval_strategy != "no" and self.lr_scheduler_type not in _BY_LOSS:
            self.metric_for_best_model = self.metric_for_best_model or BEST_METRIC  # type: ignore[has-type]
        super().__post_init__()
        refuse_model_kwargs(self)
        self._require(
            self.temperature > 0,
            "temperature",
            "must be above 0: a group of equal greedy samples teaches nothing",
        )
        check_cuda_graphs(self.engine_cuda_graphs)
        check_engine_kwargs(self.engine_kwargs or {})
        self._require(
            self.engine_dtype in (None, "bfloat16", "float16", "float32"),
            "engine_dtype",
            "must be 'bfloat16', 'float16', 'float32', or left out",
        )
        self._require(self.thinking in ("keep", "template"), "thinking", "must be 'keep' or 'template'")
        self._require_one_of("cut_sessions", ("train", "mask", "leave_out"))
        self._require_turn_credit_works()
        self._require(
            self.train_turns in ("all", "last") or is_object_name(self.train_turns),
            "train_turns",
            "must be 'all', 'last' or 'package.module:function'",
        )
        for name in ("max_policy_lag", "resample_zero_variance"):
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 0, name, "must be 0 or more")
        self._require(
            self.max_completion_length is not None and self.max_completion_length >= 1,
            "max_completion_length",
            "must be at least 1",
        )
        for name in ("engine_max_num_seqs", "max_session_tokens", "vllm_max_model_length"):
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "must be at least 1, or left out")
        share = self.vllm_gpu_memory_utilization
        self._require(0 < share <= 1, "vllm_gpu_memory_utilization", "must be above 0 and at most 1")
        self._require_policy_lag_works()
        self._require(
            self.max_trajectory_tokens is None or self.max_trajectory_tokens >= 2,
            "max_trajectory_tokens",
            "must be at least 2",
        )
        for name in ("max_agents", "max_preparing", "max_grading", "max_session_calls"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        self.build_rollout_config()  # which refuses what it cannot run

    def _require_policy_lag_works(self) -> None:
        if not self.max_policy_lag:
            return
        self._require(
            self.vllm_importance_sampling_correction,
            "max_policy_lag",
            "must be 0 with vllm_importance_sampling_correction: false: what an older policy sampled would be trained "
            "as if the present one had",
        )
        micro_steps = self.steps_per_generation * self.num_iterations
        # the loader has fetched the next generation batch, which is begun early, only where a step ends with this one
        self._require(
            self.gradient_accumulation_steps % micro_steps == 0,
            "max_policy_lag",
            "must be 0 where a generation batch feeds several optimizer steps: the next batch is not known before the "
            "last of them, so that no session could begin early. Let steps_per_generation x num_iterations (it is "
            f"{micro_steps}) divide gradient_accumulation_steps (it is {self.gradient_accumulation_steps})",
        )

    def _require_turn_credit_works(self) -> None:
        self._require_one_of("turn_credit", TURN_CREDITS)
        self._require(self.turn_credit_weight > 0, "turn_credit_weight", "must be above 0")
        if self.turn_credit == "none":
            return
        for name, value, why in (
            ("importance_sampling_level", "token", "a ratio of a whole rollout has one advantage"),
            ("multi_objective_aggregation", "sum_then_normalize", "the returns are sums of all rewards"),
            ("resample_zero_variance", 0, "a group of one reward may teach by its calls"),
            ("off_policy_mask_threshold", None, "it masks whole rollouts by the sign of their advantage"),
        ):
            self._require(getattr(self, name) == value, name, f"must be {value!r} with turn_credit: {why}")
        self._require(
            self.loss_type != "vespo", "loss_type", "must not be 'vespo' with turn_credit, as it weighs rollouts"
        )

    @property
    def engine_slots(self) -> int:
        """Requests that the engine samples at once."""
        return self.engine_max_num_seqs or min(256, 4 * self.max_agents)

    @property
    def endpoint_limits(self) -> dict[str, int]:
        """Return what agents are told of the model's limits; nothing where only the engine will know the window."""
        if self.vllm_max_model_length is None:
            return {}
        return {"max_model_len": self.vllm_max_model_length, "max_tokens": self.max_completion_length}

    def build_rollout_config(self) -> RolloutConfig:
        """Build the settings of the rollout runner."""
        return RolloutConfig(
            max_preparing=self.max_preparing,
            max_agents=self.max_agents,
            max_grading=self.max_grading,
            limits=SessionLimits(max_calls=self.max_session_calls, max_sampled_tokens=self.max_session_tokens),
            train_auxiliary=self.train_auxiliary,
            max_policy_lag=self.max_policy_lag,
            straggler_quantile=self.straggler_quantile,
            retry_lost_sessions=self.retry_lost_sessions,
        )
