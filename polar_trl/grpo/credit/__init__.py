"""Advantages: of rollouts over their group, and of single calls."""
