"""Evaluate a checkpoint or a served model: pass@k over a task set, with intervals."""
