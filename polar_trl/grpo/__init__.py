"""The trainer: from rollouts to an optimizer step. `step` is a step, top to bottom."""
