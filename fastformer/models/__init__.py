"""Whole models with a configuration: Transformer (encoder-decoder) and GPT (decoder-only)."""
