"""nn.TransformerEncoderLayer, and six of them as nn.TransformerEncoder, beside torch.nn's and the baseline's.

torch.nn has its own fast path for evaluation, which also skips padding; the settings here enable it.
"""

from benchmarks.cases.models.modules import benchmarks_of

BENCHMARKS = [*benchmarks_of("encoder_layer"), *benchmarks_of("encoder")]
