"""What can answer: kernel families, each a config table, pure functions and a CUDA source."""
