"""Write and read checkpoints, and go on from one exactly."""
