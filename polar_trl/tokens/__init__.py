"""Chat templates: messages to prompt ids and replies back, continued token by token."""
