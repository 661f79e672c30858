"""Ways of computing that leave the arithmetic to a library's products of matrices.

    im2col.py    convolution: a kernel of ours copies windows into rows, and cuBLAS multiplies
    epilogue.py  chains of linear layers: bias and ReLU in cuBLASLt's epilogue
    strassen.py  chains of linear layers by seven products of half the size
    run.py       launches with products in them, on tensors

The first three need neither PyTorch nor a GPU. cuBLAS is PyTorch's, and called by its functions.
"""
