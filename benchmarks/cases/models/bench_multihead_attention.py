"""nn.MultiheadAttention, as self-attention without weights, beside torch.nn's, compiled or not, and the baseline's."""

from benchmarks.cases.models.modules import benchmarks_of

BENCHMARKS = benchmarks_of("multihead_attention")
