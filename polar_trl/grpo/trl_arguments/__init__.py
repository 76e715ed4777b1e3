"""Arguments of TRL and transformers that cannot work with agents, and why."""
