"""Trained models, one folder a version."""
