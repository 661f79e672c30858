"""cuDNN's execution plans, measured, learned and chosen as confpred kernels are.

    table.py   the plans that cuDNN has offered so far, by engine and knobs: ``plans.csv``
    family.py  which of them may serve a problem, and how they tile it: ``tiles.csv``
    plans.py   what cuDNN offers for a problem; plans that are built and launched on a GPU

The last needs ``nvidia-cudnn-frontend``, cuDNN's own Python front end.
"""
