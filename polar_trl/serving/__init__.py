"""Answer agents' requests over HTTP, and bound what their requests and connections may cost."""
