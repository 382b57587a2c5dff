"""nn.MultiheadAttention, self-attention without weights, against torch.nn's, compiled and not, and the baseline's."""

from benchmarks.cases.models.modules import benchmarks_of

BENCHMARKS = benchmarks_of("multihead_attention")
