"""Small helpers for text, time and numbers."""
