"""Build agent, sandboxes and grader from the settings of a run file; check tasks with them."""
