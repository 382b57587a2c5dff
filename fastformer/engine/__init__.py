"""Frozen copies of weights for the C++ engine, and how a model's changes are noticed.

This room is below the modules and all models: it knows modules only as torch.nn's, and what packs their weights is
handed to it.
"""
