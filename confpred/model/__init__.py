"""Trained models: a folder, its trees, and how they rank candidates."""
