"""Models from measurements of one's own GPU: choosing what to measure, judging the new model, and
checking the model in use for drift. `confpred retrain` and `confpred drift` are its commands."""
