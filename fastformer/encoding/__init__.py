"""Encoders from the texts to the numbers: embeddings of texts, scores of pairs, classes.

engine.py          the model on the C++ engine, or by its modules
"""
