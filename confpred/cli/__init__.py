"""The `confpred` command."""
