"""Checking and timing candidates on a GPU, all of them under one protocol."""
