"""Record a session: a request becomes a recorded call, and calls become a file on disk."""
