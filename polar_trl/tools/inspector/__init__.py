"""Show a run's folder as a local web page, read-only."""
