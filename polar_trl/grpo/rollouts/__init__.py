"""Rollouts of a batch of data rows: begun early, carried over, resampled, handed to the step."""
