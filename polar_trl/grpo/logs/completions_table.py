"""Log a table of rollouts (`log_completions`) per step: a parquet file, and a table in the trackers of `report_to`.

In the place of TRL's own, which knows no evaluations (their file would replace the step's), no TensorBoard and no
sessions, and whose trackio table counts as a step. A row is one rollout that the step trained (or an evaluation ran),
with the instruction and the last conversation as text. No tracker gets a whole session: a long cell is shortened in
the middle, with a mark that says where the session's record is.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl.trainer.utils import print_prompt_completions_sample

from polar_trl.rollout.session_run import RolloutResult
from polar_trl.run_folder import find_evaluation

FOLDER = "completions"
MAX_PROMPT_CHARS = 2_000
MAX_COMPLETION_CHARS = 12_000
MAX_PRINTED_CHARS = 1_500
"""Of a cell on the terminal."""
NUM_TEXTS = 4
"""TensorBoard has no tables: it gets this many rollouts of a step as text, from the worst reward to the best."""
_NO_FILE_NAME = re.compile(r"[^\w.-]+")

TableRow = dict[str, Any]


class CompletionsTable(TrainerCallback):
    """Collect the rollouts of each step and write them when the trainer logs, on rank 0.

    Args:
        folder: The run's.
        name_record: A record's path as rows say it.
        callbacks: The trainer's callbacks, among them those of its trackers.
        num_printed: Rollouts that are also printed; None or 0: none.
        unique_prompts: Show trackers one rollout of each instruction only.
    """

    def __init__(
        self,
        folder: Path,
        name_record: Callable[[Path | None], str],
        callbacks: Callable[[], Sequence[TrainerCallback]],
        *,
        num_printed: int | None = None,
        unique_prompts: bool = False,
    ) -> None:
        self._folder = folder / FOLDER
        self._name_record = name_record
        self._callbacks = callbacks
        self._num_printed = num_printed or 0
        self._unique_prompts = unique_prompts
        self._notes: dict[str, TableRow] = {}
        """Cells by rollout id, known before its advantage is."""
        self._pending: dict[str, list[TableRow]] = {"train": [], "eval": []}

    def note(
        self,
        prompts: Sequence[Any],
        finished: Sequence[RolloutResult],
        completions: Sequence[Sequence[Mapping[str, Any]]],
        extra: Mapping[str, Sequence[Any]],
    ) -> None:
        """Note rollouts that were graded.

        Args:
            prompts: Their instructions, as text or as messages.
            finished: The rollouts.
            completions: Their conversations, as messages.
            extra: Values for each by column, from reward functions (TRL's `log_extra`).
        """
        for index, (prompt, result, completion) in enumerate(zip(prompts, finished, completions, strict=True)):
            record = self._name_record(result.record_path)
            self._notes[result.rollout.id] = {
                "prompt": shorten(_render(prompt), MAX_PROMPT_CHARS, record),
                "completion": shorten(_render(completion), MAX_COMPLETION_CHARS, record),
                **{name: _plain(values[index]) for name, values in extra.items() if len(values) == len(finished)},
            }

    def add(
        self,
        mode: str,
        step: int,
        finished: Sequence[RolloutResult],
        rewards_F: Mapping[str, Sequence[float]],
        rewards: Sequence[float],
        advantages: Sequence[float],
    ) -> None:
        """Add this rank's rollouts of a generation batch; all ranks' are kept on the first (a collective).

        Args:
            mode: "train" or "eval".
            step: The optimizer step that comes next; of an evaluation, the one before it.
            finished: The rollouts that were noted and are in this batch.
            rewards_F: Rewards of each rollout by reward function, NaN where there is none.
            rewards: The weighted sum of each.
            advantages: Of each.
        """
        rows = []
        for index, result in enumerate(finished):
            rollout, note = result.rollout, self._notes.pop(result.rollout.id)
            rows.append(
                {
                    "step": step,
                    "rollout": rollout.id,
                    "task": rollout.task_id,
                    "prompt": note.pop("prompt"),
                    "completion": note.pop("completion"),
                    **{name: _number(values[index]) for name, values in rewards_F.items()},
                    "reward": _number(rewards[index]),
                    "advantage": _number(advantages[index]),
                    "calls": len(rollout.calls),
                    "sampled_tokens": sum(len(call.completion.token_ids) for call in rollout.calls),
                    "stop_reason": rollout.stop_reason,
                    "error": rollout.error or "",
                    "record": self._name_record(result.record_path),
                    **note,
                }
            )
        self._notes.clear()  # what was resampled is in no batch
        self._pending[mode].extend(gather_object(rows))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the rollouts that were added since the last time."""
        name = find_evaluation(logs or {})
        mode = "train" if name is None else "eval"
        rows, self._pending[mode] = self._pending[mode], []
        if not rows or not state.is_world_process_zero:
            return
        rows = _level(rows)
        step = state.global_step
        self._folder.mkdir(parents=True, exist_ok=True)
        prefix = "completions" if name is None else f"eval_{_NO_FILE_NAME.sub('_', name)}".rstrip("_")
        pq.write_table(pa.Table.from_pylist(rows), self._folder / f"{prefix}_{step:05d}.parquet")
        if self._num_printed:
            _print(_spread(rows, self._num_printed), step)
        shown = list({row["prompt"]: row for row in reversed(rows)}.values()) if self._unique_prompts else rows
        key = "completions" if name is None else f"eval/{name}/completions" if name else "eval/completions"
        for callback in self._callbacks():
            send = _SENDERS.get(type(callback).__name__)
            if send is not None:
                send(callback, key, shown, step)


def shorten(text: str, max_chars: int, record: str) -> str:
    """Leave out the middle of a long text, with a mark that says how much is missing and where all of it is."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    where = f"; the whole session: {record}" if record else ""
    mark = f"\n\n[... {len(text) - 2 * half:,} characters left out{where} ...]\n\n"
    return text[:half] + mark + text[-half:]


def _render(messages: Any) -> str:
    """Render a conversation in TRL's form as plain text, each message under its role."""
    if isinstance(messages, str):
        return messages
    parts = []
    for message in messages:
        if message.get("reasoning_content"):
            parts.append(f"[{message['role']}, reasoning]\n{message['reasoning_content']}")
        if message.get("content") or not message.get("tool_calls"):
            parts.append(f"[{message['role']}]\n{message.get('content') or ''}")
        for call in message.get("tool_calls", ()):
            parts.append(f"[call {call['function']['name']}]\n{call['function']['arguments']}")
    return "\n\n".join(parts)


def _level(rows: Sequence[TableRow]) -> list[TableRow]:
    """Give the rows one set of columns, each of one kind: reward functions may add any values at some steps."""
    columns = {name: _level_column([row.get(name) for row in rows]) for row in rows for name in row}
    return [{name: column[index] for name, column in columns.items()} for index in range(len(rows))]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _level_column(values: Sequence[Any]) -> Sequence[Any]:
    """Make a column of numbers, or truth values, or text that UTF-8 holds; None stays None."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in known) or all(map(_is_number, known)):
        return values
    return [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _spread(rows: Sequence[TableRow], number: int) -> list[TableRow]:
    """Choose `number` rows, from the worst reward to the best; those without a reward come first."""
    ordered = sorted(rows, key=lambda row: -math.inf if row["reward"] is None else row["reward"])
    number = min(number, len(ordered))
    last = len(ordered) - 1
    return [ordered[round(i * last / max(1, number - 1))] for i in range(number)]


def _print(rows: Sequence[TableRow], step: int) -> None:
    print_prompt_completions_sample(
        [shorten(row["prompt"], MAX_PRINTED_CHARS, row["record"]) for row in rows],
        [shorten(row["completion"], MAX_PRINTED_CHARS, row["record"]) for row in rows],
        {"reward": [math.nan if row["reward"] is None else row["reward"] for row in rows]},
        [row["advantage"] or 0.0 for row in rows],
        step,
        extra={"task": [row["task"] for row in rows]},
    )


def _send_to_wandb(callback: Any, key: str, rows: Sequence[TableRow], step: int) -> None:
    wandb = callback._wandb
    if wandb.run is not None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True)
        # the axis that transformers defines for all that it logs
        wandb.log({key: table, "train/global_step": step})


def _send_to_trackio(callback: Any, key: str, rows: Sequence[TableRow], step: int) -> None:
    trackio = callback._trackio
    # without a step of its own, a table would count as one and move all later points of the curves
    trackio.log({key: trackio.Table(data=rows)}, step=step)


def _send_to_tensorboard(callback: Any, key: str, rows: Sequence[TableRow], step: int) -> None:
    for number, row in enumerate(_spread(rows, NUM_TEXTS)):
        texts = {name: row[name] for name in ("prompt", "completion")}
        facts = {
            name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in row.items() if name not in texts
        }
        lines = [facts, ["---"] * len(facts), facts.values()]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        # indented, a text is a Markdown block that nothing in it can end
        blocks = [f"\n\n**{name}**\n\n{indent(text, '    ', lambda line: True)}" for name, text in texts.items()]
        callback.tb_writer.add_text(f"{key}/{number}", table + "".join(blocks), step)
    callback.tb_writer.flush()


_SENDERS: Mapping[str, Callable[[Any, str, Sequence[TableRow], int], None]] = {
    "WandbCallback": _send_to_wandb,
    "TrackioCallback": _send_to_trackio,
    "TensorBoardCallback": _send_to_tensorboard,
}
"""Functions that give a tracker a table, by the class of its callback of transformers."""
