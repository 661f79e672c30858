"""Norms with their activation, forward and backward."""
