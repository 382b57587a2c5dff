"""Text in, batches out: tokenizers, batching, the built-in task."""
