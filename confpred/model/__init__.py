"""What was learned: a model folder, its trees, and the order in which they put candidates."""
