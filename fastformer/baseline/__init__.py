"""The un-accelerated models that benchmarks compare with. Imports torch alone."""

from fastformer.baseline.lstm import LSTMSeq2Seq as LSTMSeq2Seq
from fastformer.baseline.transformer import Transformer as Transformer
