"""From a problem to a choice: a pinned, measured or predicted one."""
