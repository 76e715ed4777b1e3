"""The attacker's side: copied into the sandbox, where nothing else of this package is."""
