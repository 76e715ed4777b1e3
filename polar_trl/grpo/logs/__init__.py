"""Files and metrics that a training run writes: settings, steps, rollouts, trained rows, phases."""
