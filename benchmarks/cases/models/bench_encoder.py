"""nn.TransformerEncoderLayer and six of them as nn.TransformerEncoder, against torch.nn's and the baseline's.

torch.nn has a fast path of its own for evaluation, which leaves padding out, too; its settings here allow it.
"""

from benchmarks.cases.models.modules import benchmarks_of

BENCHMARKS = [*benchmarks_of("encoder_layer"), *benchmarks_of("encoder")]
