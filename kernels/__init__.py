"""CUDA sources, read as data by `confpred.cuda`; nothing here is Python code to run."""
