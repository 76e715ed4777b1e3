"""Sample completions: token ids to token ids with log-probabilities, from vLLM in this process or from a server."""
