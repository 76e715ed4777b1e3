"""Roll out tasks: many sessions at a time, graded, in groups that a training step can take."""

from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner

__all__ = ["Job", "RolloutConfig", "RolloutRunner"]
