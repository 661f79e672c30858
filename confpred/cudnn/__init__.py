"""cuDNN's execution plans, as configs that are measured, learned and chosen like our kernels'.

    names.py   engines and knobs by name
    table.py   the plans that cuDNN has offered so far, numbered: ``plans.csv``
    tiles.py   how plans tile the product, as was seen of them: ``tiles.csv``
    family.py  which of them may serve a problem; needs neither cuDNN nor a GPU
    graphs.py  a problem as cuDNN is told of it, and what it offers; needs no GPU
    plans.py   plans that are built and launched on a GPU

The last two need ``nvidia-cudnn-frontend``, cuDNN's own Python front end.
"""
