"""Master weights, their rounding, and the push into the engine: one policy in trainer and engine."""
