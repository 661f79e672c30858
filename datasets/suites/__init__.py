"""The problem suites; `confpred retrain` measures those of the three directions by default."""
