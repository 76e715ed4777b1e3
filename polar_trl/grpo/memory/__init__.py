"""Count the memory of a run on a GPU, and choose by it how many layers are checkpointed."""
