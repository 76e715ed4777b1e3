"""Metrics of several generation batches are logged together."""

from collections import defaultdict

from polar_trl.grpo.logs.metrics import append_metrics


def test_sampled_is_trained_and_dropped_whatever_is_logged_together() -> None:
    batches = [
        {"polar/sampled_tokens": 100, "polar/stopped/completed": 4},
        {"polar/sampled_tokens": 90, "polar/dropped/zero_variance": 30, "polar/stopped/completed": 3},
        {"polar/sampled_tokens": 80, "polar/dropped/zero_variance": 10, "polar/dropped/stale": 5},
    ]
    waiting: defaultdict[str, list[float]] = defaultdict(list)
    for number, batch in enumerate(batches, start=1):
        append_metrics(waiting, batch)
        waiting["polar/trained_tokens"].append(
            batch["polar/sampled_tokens"] - sum(v for name, v in batch.items() if "dropped" in name)
        )
        logged = {name: sum(values) / len(values) for name, values in waiting.items()}
        dropped = sum(value for name, value in logged.items() if name.startswith("polar/dropped/"))
        assert abs(logged["polar/sampled_tokens"] - logged["polar/trained_tokens"] - dropped) < 1e-9
        assert {len(values) for values in waiting.values()} == {number}
    assert waiting["polar/stopped/completed"] == [4, 3, 0]
