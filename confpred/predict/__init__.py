"""From a problem to a choice: what is pinned, measured or predicted."""
