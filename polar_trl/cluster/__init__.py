"""Run the agents' side of sessions on the nodes of a Ray cluster: sandboxes and graders there, records here."""
