"""The unaccelerated models that benchmarks compare with. They import nothing but torch."""

from fastformer.baseline.lstm import LSTMSeq2Seq as LSTMSeq2Seq
from fastformer.baseline.transformer import Transformer as Transformer
