"""Split tasks into train and test, a share of every repository. All examples of a task are on one side.

A repository's only task is never for testing: nothing of that repository would be left to train on.
"""

from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256


def choose_test_tasks(repos: Mapping[str, str], *, share: float, seed: int) -> frozenset[str]:
    """Choose about `share` of the tasks of every repository for testing.

    Each repository gives the whole number of tasks below its share; what is then missing of the share of all of them
    comes from those that were rounded down most (the largest remainders). Which tasks of a repository are taken
    depends on the seed and their ids only, so that further tasks change little.

    Args:
        repos: Task id -> repository.
        share: From 0 to below 1.
    """
    tasks: defaultdict[str, list[str]] = defaultdict(list)
    for task, repo in repos.items():
        tasks[repo].append(task)
    exact = {repo: share * len(members) for repo, members in tasks.items() if len(members) > 1}
    counts = {repo: int(wanted) for repo, wanted in exact.items()}
    missing = round(sum(exact.values())) - sum(counts.values())
    by_remainder = sorted(exact, key=lambda repo: (counts[repo] - exact[repo], repo))
    for repo in [repo for repo in by_remainder if counts[repo] < len(tasks[repo]) - 1][: max(0, missing)]:
        counts[repo] += 1
    chosen: set[str] = set()
    for repo, count in counts.items():
        chosen.update(sorted(tasks[repo], key=lambda task: _rank(task, seed))[:count])
    return frozenset(chosen)


def _rank(task: str, seed: int) -> bytes:
    return sha256(f"{seed}/{task}".encode("utf-8", "surrogatepass")).digest()
