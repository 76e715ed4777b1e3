"""GRPO's losses over the rows of a step, and the correction for the gap between trainer and engine."""
