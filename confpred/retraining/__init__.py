"""Models from measurements of one's own GPU: what to measure, whether it helped, and whether the
model in use still holds. `confpred retrain` and `confpred drift` are its commands."""
