"""Write a Hugging Face data set of the accepted sessions of a folder.

    DATA_SET/README.md                            the card; tells `datasets.load_dataset` what there is
    DATA_SET/tokens/{train,test}-HASH.parquet     input_ids and assistant_masks, exactly as sampled
    DATA_SET/messages/{train,test}-HASH.parquet   messages and tools, to be tokenized by whoever trains
    DATA_SET/acceptance.json                      the counts

The same sessions and settings give the same files. Their names have a hash of their content: `datasets` caches by a
folder's own name and its card, and would otherwise give the rows of another data set. Without a row to train on,
nothing is written (`PolarError`); an earlier data set is replaced only when the new one is whole.
"""

import json
import math
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from datasets import Dataset, Features, Json, List, Value, disable_progress_bars, enable_progress_bars

from polar_trl.collect.accept import NO_REPO, Acceptance, choose_accepted, count_acceptance, total_acceptance
from polar_trl.collect.card import Files, render_card
from polar_trl.collect.examples import Example, build_examples
from polar_trl.collect.split import choose_test_tasks
from polar_trl.errors import ConfigError, PolarError, RecordError
from polar_trl.eval.sample_tasks import RESULTS_FILE, SampleResult, read_results
from polar_trl.recording.log import read_record
from polar_trl.types import Rollout

REPORT_FILE = "acceptance.json"
SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Settings that choose the examples of the data set."""

    num_samples: int | None = None
    """The first so many sessions of each task; None takes all."""
    min_reward: float = 1.0
    max_per_task: int | None = None
    """Accepted sessions of one task; None keeps all."""
    max_tokens: int | None = None
    """Rows that are longer are left out; those without token ids have no length here."""
    with_auxiliary: bool = False
    test_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.min_reward):
            raise ConfigError(f"min_reward is {self.min_reward}; give a number, such as 1.0")
        if not 0.0 <= self.test_share < 1.0:
            raise ConfigError(f"test_share is {self.test_share}; give a share from 0 to below 1, such as 0.1")
        for name in ("max_per_task", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1, or left out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Counts of what was collected, kept and left out."""

    by_repo: Mapping[str, Acceptance]
    total: Acceptance
    rows: Mapping[str, Mapping[str, Mapping[str, int]]]
    """Numbers of rows by form ("tokens", "messages"), repository and split."""
    left_out: Mapping[str, int]
    """Numbers of rows by reason: "too_long" of both forms, "unreadable_messages" of the messages."""
    text_only_rows: int
    """Rows without token ids."""
    is_graded: bool = True
    """False: somebody chose the sessions, and their reward of 1 stands for that."""

    def num_rows(self, form: str, split: str | None = None) -> int:
        """Return the number of rows of a form, of one split or of both."""
        return sum(
            count
            for counts in self.rows[form].values()
            for name, count in counts.items()
            if split is None or name == split
        )

    def render(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        acceptances = {repo: _render_acceptance(counts) for repo, counts in self.by_repo.items()}
        return {
            "by_repo": acceptances,
            "total": _render_acceptance(self.total),
            "rows": self.rows,
            "left_out": self.left_out,
            "text_only_rows": self.text_only_rows,
            "is_graded": self.is_graded,
        }


@dataclass(slots=True)
class _Forms:
    """The columns of both forms, split by split."""

    tokens: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    messages: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {split: [] for split in SPLITS})


def build_data_set(
    folder: Path,
    target: Path,
    selection: Selection,
    *,
    agent: str,
    model: str,
    results: Sequence[SampleResult] | None = None,
    is_graded: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Write the data set of a folder of `sample_tasks`.

    Args:
        folder: With `results.jsonl` and the sessions.
        target: Replaced if it holds an earlier data set.
        agent: Whose sessions they are, and
        model: what answered it, for the card.
        results: Of the sessions; None: those in `results.jsonl`.
        is_graded: Whether a grader gave them their rewards.
        on_progress: Called with how many accepted sessions have been read, and of how many.

    Raises:
        PolarError: nothing was accepted. An earlier data set is left as it was.
        ConfigError: `target` holds something else.
        LawError, RecordError: a session's trajectories break a law, or its record cannot be read.
    """
    refuse_foreign(target)
    results = [
        result
        for result in (read_results(folder) if results is None else results)
        if selection.num_samples is None or result.sample < selection.num_samples
    ]
    chosen = choose_accepted(results, min_reward=selection.min_reward, max_per_task=selection.max_per_task)
    total = total_acceptance(results, min_reward=selection.min_reward)
    if not chosen:
        raise PolarError(
            f"none of {total.attempts} graded sessions in {folder} has a reward of {selection.min_reward:g} or more"
            f"{f', and {total.failed} failed without one' if total.failed else ''}; no data set was written"
        )
    kept, left_out = _read_examples(folder, chosen, selection, on_progress)
    forms, counts = _split(kept, selection, agent)
    report = Report(
        by_repo=count_acceptance(results, min_reward=selection.min_reward),
        total=total,
        rows=counts,
        left_out={name: count for name, count in sorted(left_out.items()) if count},
        text_only_rows=sum(row.token_ids_T is None for _, row in kept),
        is_graded=is_graded,
    )
    if not forms.tokens["train"] and not forms.messages["train"]:
        raise PolarError(f"{len(chosen)} sessions were accepted, but none of their rows is left ({report.left_out})")
    _write(
        target, forms, report, lambda files: render_card(report, files, asdict(selection), agent=agent, model=model)
    )
    return report


def refuse_foreign(target: Path) -> None:
    """Raise `ConfigError` where a data set would replace something else."""
    if target.exists() and not (target / REPORT_FILE).exists():
        raise ConfigError(
            f"{target} holds something else than a data set of polar-trl collect; name another output_dir"
        )


def _read_examples(
    folder: Path, chosen: Sequence[SampleResult], selection: Selection, on_progress: Callable[[int, int], None]
) -> tuple[list[tuple[SampleResult, Example]], Counter[str]]:
    """Build the examples of the chosen sessions, and count those that are left out by reason."""
    kept: list[tuple[SampleResult, Example]] = []
    left_out: Counter[str] = Counter()
    for number, result in enumerate(chosen, start=1):
        for example in build_examples(_read_accepted(folder, result), with_auxiliary=selection.with_auxiliary):
            num_tokens = 0 if example.token_ids_T is None else len(example.token_ids_T)
            if selection.max_tokens is not None and num_tokens > selection.max_tokens:
                left_out["too_long"] += 1
            else:
                kept.append((result, example))
        on_progress(number, len(chosen))
    left_out["unreadable_messages"] = sum(example.messages is None for _, example in kept)
    return kept, left_out


def _read_accepted(folder: Path, result: SampleResult) -> Rollout:
    """Read a session as it was graded: a record that was shortened since has lost tokens, and is no example."""
    path = folder / result.record
    try:
        record = read_record(path)
        if not record.finished:
            raise RecordError(f"{path}: its end is missing")
        return record.rollout
    except RecordError as error:
        raise RecordError(
            f"{error}. Put the file back, or take its line out of {folder / RESULTS_FILE}: that sample then runs again"
        ) from error


def _split(
    kept: Sequence[tuple[SampleResult, Example]], selection: Selection, agent: str
) -> tuple[_Forms, dict[str, dict[str, dict[str, int]]]]:
    """Put every example into its split, and count those of each repository."""
    repos = {result.task: result.repo or NO_REPO for result, _ in kept}
    test = choose_test_tasks(repos, share=selection.test_share, seed=selection.seed)
    forms = _Forms()
    counts: dict[str, dict[str, dict[str, int]]] = {"tokens": {}, "messages": {}}
    for result, row in kept:
        split, repo = "test" if result.task in test else "train", result.repo or NO_REPO
        about = {
            "id": row.id,
            "task_id": _render_text(result.task),
            "repo": None if result.repo is None else _render_text(result.repo),
            "reward": result.reward,
            "session": result.record,
            "agent": agent,
        }
        if row.token_ids_T is not None:
            forms.tokens[split].append({"input_ids": row.token_ids_T, "assistant_masks": row.mask_T, **about})
            _count(counts["tokens"], repo, split)
        if row.messages is not None:
            # as text: the library's own encoder keeps ten decimals of a number
            texts = {"messages": _render_json(row.messages), "tools": _render_json(row.tools)}
            forms.messages[split].append({**texts, **about})
            _count(counts["messages"], repo, split)
    return forms, counts


def _render_json(values: Sequence[Any]) -> list[str]:
    return [orjson.dumps(value).decode() for value in values]


def _render_text(text: str) -> str:
    """Return the text as UTF-8 holds it: an id may have half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _count(counts: dict[str, dict[str, int]], repo: str, split: str) -> None:
    counts.setdefault(repo, dict.fromkeys(SPLITS, 0))[split] += 1


def _write(target: Path, forms: _Forms, report: Report, render: Callable[[Files], str]) -> None:
    """Write all files into a folder beside the target, which then takes its place. `render` makes the card."""
    name = f".{target.name}.{secrets.token_hex(4)}"
    draft, before = (target.with_name(f"{name}{end}") for end in ("", ".before"))
    files: dict[str, dict[str, str]] = {}
    try:
        draft.mkdir(parents=True)
        disable_progress_bars()  # of the library, which has one for every file
        for form in ("tokens", "messages"):
            for split, rows in getattr(forms, form).items():
                if rows:
                    path = _write_parquet(draft / form, split, form, rows)
                    files.setdefault(form, {})[split] = path.relative_to(draft).as_posix()
        (draft / "README.md").write_text(render(files), encoding="utf-8", errors="replace")
        counts = json.dumps(report.render(), indent=1, ensure_ascii=False) + "\n"
        (draft / REPORT_FILE).write_text(counts, encoding="utf-8", errors="replace")
        if target.exists():
            target.rename(before)
        draft.rename(target)
    finally:
        enable_progress_bars()
        if before.exists() and not target.exists():
            before.rename(target)  # stopped between the two
        for folder in (draft, before):
            shutil.rmtree(folder, ignore_errors=True)


def _write_parquet(folder: Path, split: str, form: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    about = {name: Value("string") for name in ("id", "task_id", "repo", "session", "agent")}
    # Json keeps the keys of each message and each schema: as structs, every one would get the keys of all, as nulls
    columns = {
        "tokens": {"input_ids": List(Value("int32")), "assistant_masks": List(Value("int8"))},
        "messages": {"messages": List(Json()), "tools": List(Json())},
    }[form]
    features = Features({**columns, **about, "reward": Value("float64")})
    folder.mkdir(exist_ok=True)
    data = {name: [row[name] for row in rows] for name in features}
    path = folder / f"{split}.parquet"
    Dataset.from_dict(data, features=features).to_parquet(path)
    return path.rename(folder / f"{split}-{sha256(path.read_bytes()).hexdigest()[:12]}.parquet")


def _render_acceptance(counts: Acceptance) -> dict[str, Any]:
    return asdict(counts) | {"rate": None if counts.rate is None else round(counts.rate, 4)}
