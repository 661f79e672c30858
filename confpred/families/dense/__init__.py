"""Dense convolution of few channels."""
