"""Tools around a run: inspect it, replay it, plan its memory, check agents and templates, clean up."""
