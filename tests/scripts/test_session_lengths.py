"""Test that drawn sessions have the published statistics, and that both kinds of rows hold the same samples."""

import numpy as np
import pytest
from session_lengths import SETS, build_rows, build_sessions

from polar_trl.grpo.packing.layout import build_layout


def test_swe_sessions_have_polars_messages() -> None:
    messages = np.array([s.num_messages for s in build_sessions("swe", num_groups=250, group_size=16)])
    assert abs(messages.mean() / 104 - 1) < 0.03
    assert 0.04 < (messages > 200).mean() < 0.08
    spread = np.median([step.max() / step.min() for step in messages[: 62 * 64].reshape(-1, 64)])
    assert 7 < spread < 15  # lengths of a step's 64 differ tenfold


@pytest.mark.parametrize(("name", "merging", "sharing"), [("20k/40", 26.5, 1.41), ("5k/30", 17.0, 1.14)])
def test_rows_have_the_ratios_of_the_survey(name: str, merging: float, sharing: float) -> None:
    sessions = build_sessions(name, num_groups=1, group_size=8, scale=0.1)
    per_request = build_rows(name, sessions, merged=False, vocab_size=50_000, scale=0.1)
    merged = [row.token_ids for row in build_rows(name, sessions, merged=True, vocab_size=50_000, scale=0.1)]
    num_merged = sum(map(len, merged))
    assert abs(sum(len(row.token_ids) for row in per_request) / num_merged / merging - 1) < 0.05
    num_unique = build_layout(merged, share_prefixes=True).num_tokens
    assert abs(num_merged / num_unique / sharing - 1) < 0.05


@pytest.mark.parametrize("name", SETS)
def test_merged_and_per_request_rows_train_the_same_tokens(name: str) -> None:
    sessions = build_sessions(name, num_groups=2, group_size=2, scale=0.01, seed=3)
    merged = build_rows(name, sessions, merged=True, vocab_size=1000, scale=0.01, seed=3)
    per_request = build_rows(name, sessions, merged=False, vocab_size=1000, scale=0.01, seed=3)
    assert len(merged) == 4
    assert [len(row.token_ids) for row in merged] == [session.num_tokens for session in sessions]
    assert [(len(row.token_ids), int(row.trainable.sum())) for row in per_request] == [
        (prompt + sampled, sampled) for session in sessions for prompt, sampled in session.calls
    ]
    for whole in merged:
        parts = [row for row in per_request if row.session == whole.session]
        assert whole.token_ids[whole.trainable].tolist() == [
            token for part in parts for token in part.token_ids[part.trainable].tolist()
        ]
        assert all(part.token_ids.tolist() == whole.token_ids[: len(part.token_ids)].tolist() for part in parts)
