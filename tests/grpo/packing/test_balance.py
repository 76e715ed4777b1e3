"""Plans hold every row once, within the budget, on ranks that are done at about one time."""

import os
import subprocess
import sys
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_lengths import AGENT_TOKENS, SETS, build_rows, build_sessions

from polar_trl.errors import ConfigError
from polar_trl.grpo.packing.balance import CostModel, Plan, plan_micro_batches
from polar_trl.grpo.packing.layout import Ids, build_layout

COST = CostModel(per_token=10.0, per_pair=1.0)
# Qwen3-0.6B: 0.44 billion parameters without embeddings, 28 layers of 16 heads of 128.
PUBLISHED = [name for name in SETS if name not in AGENT_TOKENS]
QWEN3 = CostModel(per_token=2 * 0.44e9, per_pair=4.0 * 28 * 16 * 128)

# Few different tokens, so that prefixes are shared often.
ROWS = st.lists(st.lists(st.integers(0, 1), max_size=9).map(lambda row: np.array(row, dtype=np.int64)), max_size=12)


def plan_rows(
    rows: list[Ids], *, num_ranks: int, max_tokens: int, share: bool = False, cost: CostModel = COST
) -> Plan:
    return plan_micro_batches(rows, num_ranks=num_ranks, max_tokens=max_tokens, share_prefixes=share, cost=cost)


def build_recorded_rows(name: str, seed: int) -> list[Ids]:
    """64 rollouts in groups of 16."""
    sessions = build_sessions(name, num_groups=4, group_size=16, seed=seed)
    return [row.token_ids for row in build_rows(name, sessions, merged=True, vocab_size=150_000, seed=seed)]


def check_plan(plan: Plan, rows: list[Ids], *, num_ranks: int, max_tokens: int, share: bool, cost: CostModel) -> None:
    """The plan's own figures against the layouts that would be forwarded."""
    assert len(plan.micro_batches) == num_ranks
    assert {len(batches) for batches in plan.micro_batches} == {plan.num_micro_batches}
    flat = [row for batches in plan.micro_batches for batch in batches for row in batch]
    assert sorted(flat) == list(range(len(rows)))
    forwarded = 0
    for batches, rank_cost in zip(plan.micro_batches, plan.costs_W, strict=True):
        layouts = [build_layout([rows[row] for row in batch], share_prefixes=share) for batch in batches]
        for layout, batch in zip(layouts, batches, strict=True):
            assert layout.num_tokens <= max_tokens or len(batch) == 1
        costs = [sum(cost.cost_of(s.end - s.start, s.depth) for s in layout.segments) for layout in layouts]
        assert sum(costs) == pytest.approx(rank_cost, rel=1e-9)
        assert all(a >= b * (1 - 1e-9) for a, b in pairwise(costs))  # the most expensive first
        filled = [batch != () for batch in batches]
        assert filled == sorted(filled, reverse=True)  # fillers at the end
        forwarded += sum(layout.num_tokens for layout in layouts)
    assert plan.forwarded_tokens == forwarded
    assert plan.unique_tokens == build_layout(rows, share_prefixes=True).num_tokens
    assert plan.lower_bound <= plan.cost * (1 + 1e-9)


@given(ROWS, st.integers(1, 5), st.integers(1, 30), st.booleans())
@settings(deadline=None)  # a plan takes as long as other jobs of the machine let it
def test_plans_hold_every_row_once_within_the_budget(
    rows: list[Ids], num_ranks: int, max_tokens: int, share: bool
) -> None:
    plan = plan_rows(rows, num_ranks=num_ranks, max_tokens=max_tokens, share=share)
    check_plan(plan, rows, num_ranks=num_ranks, max_tokens=max_tokens, share=share, cost=COST)
    assert plan == plan_rows([row.copy() for row in rows], num_ranks=num_ranks, max_tokens=max_tokens, share=share)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_clusters_of_rows_that_fork_within_are_counted_right(num_ranks: int) -> None:
    """Rows that share most tokens fork and fork again: several clusters, and what these share, in one batch."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = [np.zeros(30, dtype=np.int64)]
        for token in range(1, 40):
            stem = rows[-1] if rng.random() < 0.7 else rows[rng.integers(len(rows))]
            kept = stem[: max(1, len(stem) - rng.integers(1, 4))]
            rows.append(np.concatenate([kept, np.full(rng.integers(1, 4), token)]))
        max_tokens = int(rng.integers(30, 200))
        plan = plan_rows(rows, num_ranks=num_ranks, max_tokens=max_tokens, share=True)
        check_plan(plan, rows, num_ranks=num_ranks, max_tokens=max_tokens, share=True, cost=COST)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
@settings(deadline=None)
def test_no_plan_is_worse_than_grahams_bound(lengths: list[int], num_ranks: int) -> None:
    """LPT is at most 4/3 - 1/(3W) of the best split (Graham 1969), and local search only lowers it."""
    plan = plan_rows([np.zeros(n, dtype=np.int64) for n in lengths], num_ranks=num_ranks, max_tokens=1000)
    costs = [COST.cost_of(n) for n in lengths]
    best = min(
        max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(costs))
    )
    assert best * (1 - 1e-9) <= plan.cost <= best * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-9)


@given(ROWS)
def test_one_rank_with_room_forwards_each_prefix_once(rows: list[Ids]) -> None:
    plan = plan_rows(rows, num_ranks=1, max_tokens=1000, share=True)
    assert plan.forwarded_tokens == plan.unique_tokens
    assert plan.num_micro_batches == (1 if rows else 0)


@pytest.mark.parametrize("share", [False, True])
def test_no_rows_are_no_micro_batches(share: bool) -> None:
    plan = plan_rows([], num_ranks=3, max_tokens=10, share=share)
    assert plan.micro_batches == ((), (), ())
    assert (plan.cost, plan.forwarded_tokens, plan.unique_tokens, plan.num_micro_batches) == (0.0, 0, 0, 0)


def test_fewer_rows_than_ranks_leave_fillers() -> None:
    plan = plan_rows([np.arange(4), np.arange(9)], num_ranks=3, max_tokens=10)
    assert plan.micro_batches == (((1,),), ((0,),), ((),))


def test_a_row_beyond_the_budget_runs_alone_even_if_it_is_the_prefix_of_others() -> None:
    rows = [np.arange(50), np.arange(50), np.arange(3), np.arange(4)]
    plan = plan_rows(rows, num_ranks=1, max_tokens=10, share=True)
    assert plan.micro_batches == (((0,), (1,), (2, 3)),)
    assert (plan.forwarded_tokens, plan.unique_tokens) == (104, 50)
    assert plan.lower_bound == pytest.approx(plan.cost)  # no split could have shared more


def test_a_budget_below_every_row_gives_each_its_own_forward() -> None:
    plan = plan_rows([np.arange(n) for n in (5, 6, 7, 8)], num_ranks=2, max_tokens=1)
    assert plan.micro_batches == (((3,), (0,)), ((2,), (1,)))


def test_a_giant_row_leaves_the_others_to_the_other_ranks() -> None:
    plan = plan_rows([np.arange(n) for n in (5, 1000, 5, 5)], num_ranks=2, max_tokens=10)
    assert plan.micro_batches == (((1,), ()), ((0, 2), (3,)))
    assert plan.cost == plan.lower_bound == COST.cost_of(1000)


def test_local_search_mends_what_longest_first_leaves() -> None:
    """3 3 2 2 2 on two ranks: LPT ends with 7 and 5, a swap with 6 and 6."""
    tokens_only = CostModel(per_token=1.0, per_pair=0.0)
    rows = [np.arange(n) for n in (3, 3, 2, 2, 2)]
    assert plan_rows(rows, num_ranks=2, max_tokens=100, cost=tokens_only).costs_W == (6.0, 6.0)


def test_the_worked_example_keeps_prefix_clusters_together() -> None:
    """Rows one at a time would end with 10 and 10 tokens; clusters of two end with 6 and 6."""
    tokens_only = CostModel(per_token=1.0, per_pair=0.0)
    rows = [np.array([*map(ord, row)]) for row in ("ssssa", "ssssb", "ttttu", "ttttv")]
    plan = plan_rows(rows, num_ranks=2, max_tokens=100, share=True, cost=tokens_only)
    assert (plan.micro_batches, plan.costs_W) == ((((0, 1),), ((2, 3),)), (6.0, 6.0))


def test_a_group_stays_together_where_that_costs_no_balance() -> None:
    """Four groups whose prompt is most of a row, on two ranks: each prompt is forwarded once in the step."""
    groups = [np.full(1000, group) for group in range(4)]
    rows = [np.concatenate([groups[i % 4], [9, i]]) for i in range(16)]
    plan = plan_rows(rows, num_ranks=2, max_tokens=100_000, share=True)
    assert plan.forwarded_tokens == plan.unique_tokens == 4 * 1001 + 16
    assert plan.cost == pytest.approx(plan.lower_bound)


def test_calls_of_a_session_stay_together() -> None:
    """Each row begins with the row before: split over ranks, nearly all of it would be forwarded twice."""
    sessions = build_sessions("5k/30", num_groups=4, group_size=4, scale=0.02)
    rows = [row.token_ids for row in build_rows("5k/30", sessions, merged=False, vocab_size=1000, scale=0.02)]
    plan = plan_rows(rows, num_ranks=4, max_tokens=100_000, share=True, cost=QWEN3)
    check_plan(plan, rows, num_ranks=4, max_tokens=100_000, share=True, cost=QWEN3)
    assert plan.cost < 1.1 * plan.lower_bound


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_packed_steps_are_within_5_percent_of_the_best_split(name: str, num_ranks: int) -> None:
    for seed in range(5):
        rows = build_recorded_rows(name, seed)
        costs = QWEN3.cost_of(np.array([len(row) for row in rows]))
        for max_tokens in (32_768, 131_072):
            plan = plan_rows(rows, num_ranks=num_ranks, max_tokens=max_tokens, cost=QWEN3)
            assert plan.cost < 1.05 * max(costs.sum() / num_ranks, costs.max())


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_tree_steps_are_near_the_best_split(name: str, num_ranks: int) -> None:
    """The bound forwards each prefix once in the step: a budget and a rank each repeat the system prompt."""
    for seed in range(3):
        rows = build_recorded_rows(name, seed)
        plan = plan_rows(rows, num_ranks=num_ranks, max_tokens=131_072, share=True, cost=QWEN3)
        check_plan(plan, rows, num_ranks=num_ranks, max_tokens=131_072, share=True, cost=QWEN3)
        assert plan.cost < (1.1 if name == "20k/40" else 1.05) * plan.lower_bound
        assert plan.cost < 1.03 * max(np.mean(plan.costs_W), QWEN3.cost_of(max(map(len, rows))))
        roomy = plan_rows(rows, num_ranks=num_ranks, max_tokens=10_000_000, share=True, cost=QWEN3)
        assert roomy.cost < 1.05 * roomy.lower_bound


def test_another_process_computes_the_same_plan() -> None:
    program = (
        "from polar_trl.grpo.packing.balance import CostModel, plan_micro_batches\n"
        "import numpy as np\n"
        "rows = [np.arange(5 + 7 * i % 11) // (1 + i % 3) for i in range(40)]\n"
        "cost = CostModel(per_token=10.0, per_pair=1.0)\n"
        "print(plan_micro_batches(rows, num_ranks=3, max_tokens=20, share_prefixes=True, cost=cost))"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    rows = [np.arange(5 + 7 * i % 11) // (1 + i % 3) for i in range(40)]
    assert plans == {f"{plan_rows(rows, num_ranks=3, max_tokens=20, share=True)}\n"}


def test_the_cost_of_a_segment() -> None:
    assert COST.cost_of(3) == 30 + 1 + 2 + 3
    assert COST.cost_of(3, depth=2) == 30 + 3 + 4 + 5
    assert COST.cost_of(np.array([3, 0]), np.array([2, 7])).tolist() == [42, 0]


def test_the_cost_model_of_a_full_attention_config() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=28, num_attention_heads=16, head_dim=128, hidden_size=1024)
    assert CostModel.of(config, 440_000_000) == QWEN3


def test_linear_attention_layers_cost_by_tokens_only() -> None:
    from transformers import Qwen3_5Config, Qwen3_5TextConfig

    text = Qwen3_5TextConfig(num_hidden_layers=8, num_attention_heads=4, head_dim=32, full_attention_interval=4)
    expected = CostModel(per_token=2000.0, per_pair=4.0 * 2 * 4 * 32)
    assert CostModel.of(text, 1000) == CostModel.of(Qwen3_5Config(text_config=text.to_dict()), 1000) == expected


def test_a_config_without_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(SimpleNamespace\) has no `num_attention_heads`"):
        CostModel.of(SimpleNamespace(hidden_size=64, num_hidden_layers=2), 1000)


def test_a_budget_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_device is 0"):
        plan_rows([np.arange(3)], num_ranks=1, max_tokens=0)
