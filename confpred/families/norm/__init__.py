"""Batch norm with its activation, forward and backward."""
