"""Begin and end a run: what it holds open, what it says at its end, and what it leaves in its folder."""
