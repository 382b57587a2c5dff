"""Decoding: one search, engines behind it, and the Translator for text."""
