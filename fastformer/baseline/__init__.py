"""The un-accelerated models that benchmarks compare with. Imports torch alone."""
