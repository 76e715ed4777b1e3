"""The settings of `polar-trl eval` beside those of a run.

Nothing heavy is imported: `polar-trl eval --help` reads this file.
"""

from dataclasses import dataclass, field

from polar_trl.errors import ConfigError


@dataclass
class EvalArguments:
    """The settings of an evaluation. Raises `ConfigError` for values that cannot work together."""

    num_samples: int = field(default=1, metadata={"help": "Sessions per task."})
    k: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "Of the pass@k to report beside pass@1; at most num_samples."}
    )
    max_attempts: int = field(
        default=3,
        metadata={"help": "Sessions that are spent on one sample where the infrastructure fails and gives no reward."},
    )
    limit: int | None = field(default=None, metadata={"help": "The first so many tasks. None: all of them."})
    task_ids: list[str] = field(
        default_factory=list, metadata={"help": "Ids of the tasks to evaluate. Left out: all."}
    )
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Of sampling; 0 is greedy. None: the run's temperature."}
    )
    eval_top_p: float = field(default=1.0, metadata={"help": "Keep the likeliest tokens of this mass."})
    eval_top_k: int = field(default=0, metadata={"help": "Keep so many of the likeliest tokens; 0 keeps all."})
    num_engines: int = field(
        default=1, metadata={"help": "Processes with an engine each, one per GPU; max_agents is per engine."}
    )
    eval_gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "Share of a GPU's memory that its engine takes; nothing is trained beside it."}
    )
    base_url: str | None = field(
        default=None,
        metadata={
            "help": "An OpenAI-compatible server that samples instead, such as http://127.0.0.1:8000/v1; "
            "model_name_or_path then has its tokenizer. Its key is read from $OPENAI_API_KEY."
        },
    )
    served_name: str | None = field(
        default=None, metadata={"help": "The model's name on that server, where it serves several."}
    )
    text_only: bool = field(default=False, metadata={"help": "Do not ask that server for token ids."})
    solutions: bool = field(
        default=False,
        metadata={
            "help": "Play each task's known solution, its metadata's `gold` (a shell command), in place of sampling. "
            "Of the model only tokenizer and chat template are read."
        },
    )
    by: str = field(
        default="repo", metadata={"help": "What of a task's metadata to report apart: 'repo', or a key of metadata."}
    )

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_attempts", "num_engines"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        self._require(self.k and min(self.k) >= 1, "k", "must be numbers from 1")
        self._require(max(self.k) <= self.num_samples, "k", f"must be at most num_samples={self.num_samples}")
        self._require(self.limit is None or self.limit >= 1, "limit", "must be at least 1, or left out")
        self._require(self.eval_temperature is None or self.eval_temperature >= 0, "eval_temperature", "must be >= 0")
        self._require(0 < self.eval_top_p <= 1, "eval_top_p", "must be above 0 and at most 1")
        self._require(self.eval_top_k >= 0, "eval_top_k", "must be at least 0")
        share = self.eval_gpu_memory_utilization
        self._require(0 < share <= 1, "eval_gpu_memory_utilization", "must be above 0 and at most 1")
        self._require(
            self.base_url is None or self.num_engines == 1,
            "num_engines",
            "must be 1 with base_url: a server has engines of its own",
        )
        self._require(not (self.solutions and self.base_url), "solutions", "samples nothing; leave base_url out")
        for name in ("served_name", "text_only"):
            self._require(self.base_url or not getattr(self, name), name, "is about a server; give its base_url")
        self._require(not (self.limit and self.task_ids), "task_ids", "cannot be given beside limit")

    def _require(self, holds: object, name: str, message: str) -> None:
        if not holds:
            raise ConfigError(f"{name} {message} (it is {getattr(self, name)!r})")
