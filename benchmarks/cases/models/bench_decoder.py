"""nn.TransformerDecoderLayer, and six of them as nn.TransformerDecoder, beside torch.nn's and the baseline's."""

from benchmarks.cases.models.modules import benchmarks_of

BENCHMARKS = [*benchmarks_of("decoder_layer"), *benchmarks_of("decoder")]
