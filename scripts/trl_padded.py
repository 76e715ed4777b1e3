"""Build the padded batch that TRL itself would train: what our layouts are measured and tested against."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polar_trl.grpo.rows import Row


def build_padded_batch(rows: Sequence[Row], weights: Sequence[float]) -> dict[str, Tensor]:
    """TRL's tensors of B rows: prompts padded on the left, completions on the right.

    A row's prompt is everything before its first trainable token. Keys are TRL's: `prompt_ids`, `prompt_mask` [B, P];
    `completion_ids`, `completion_mask` (1 on real tokens), `tool_mask` (1 on trainable ones),
    `sampling_per_token_logps` [B, C]; `advantages` [B], the weights multiplied in.
    """
    starts = [int(row.trainable_T.argmax()) for row in rows]
    lengths = [len(row.token_ids_T) - start for row, start in zip(rows, starts, strict=True)]
    prompts, completions = (len(rows), max(starts)), (len(rows), max(lengths))
    batch: dict[str, Tensor] = {
        "prompt_ids": torch.zeros(prompts, dtype=torch.long),
        "prompt_mask": torch.zeros(prompts, dtype=torch.long),
        "completion_ids": torch.zeros(completions, dtype=torch.long),
        "completion_mask": torch.zeros(completions, dtype=torch.long),
        "tool_mask": torch.zeros(completions, dtype=torch.long),
        "sampling_per_token_logps": torch.zeros(completions),
        "advantages": torch.tensor([r.advantage * w for r, w in zip(rows, weights, strict=True)]),
    }
    for b, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
        batch["prompt_ids"][b, prompts[1] - start :] = torch.from_numpy(row.token_ids_T[:start])
        batch["prompt_mask"][b, prompts[1] - start :] = 1
        batch["completion_ids"][b, :length] = torch.from_numpy(row.token_ids_T[start:])
        batch["completion_mask"][b, :length] = 1
        batch["tool_mask"][b, :length] = torch.from_numpy(row.trainable_T[start:]).long()
        batch["sampling_per_token_logps"][b, :length] = torch.from_numpy(row.logprobs_T[start:])
    return batch


def split_padded_batch(batch: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """Parts of at most `batch_size` rows each, as TRL makes them: every part as wide as the longest row of all."""
    num_rows = len(batch["advantages"])
    return [
        {key: value[start : start + batch_size] if value.dim() else value for key, value in batch.items()}
        for start in range(0, num_rows, batch_size)
    ]
