"""Encoders: embeddings of texts, scores of pairs of texts, and classes of texts.

folder.py          reads folders that sentence-transformers or transformers saved
tokens.py          turns texts into ids, cut to the model's maximum length
templates.py       turns texts into ids by a chat template
batches.py         chooses the texts that are computed together
engine.py          `EncoderEngine`: runs the model in one C++ call, or by its modules
modules.py         the modules that follow the model: pooling, linear layers, norms
encoder.py         `Encoder`: embeddings
cross_encoder.py   `CrossEncoder`: scores and classes
sparse.py          SPLADE's pooling, and sparse embeddings
late_interaction.py       a ColBERT's vectors of tokens, and their scores
multi_vector_encoder.py   `MultiVectorEncoder`: vectors of tokens
token_classifier.py       `TokenClassifier`: classes of tokens and words
requests.py        the texts of one caller, and their results
scheduler.py       computes the requests of many callers together
"""

from fastformer.encoding.cross_encoder import CrossEncoder as CrossEncoder
from fastformer.encoding.encoder import Encoder as Encoder
from fastformer.encoding.engine import EncoderEngine as EncoderEngine
from fastformer.encoding.multi_vector_encoder import MultiVectorEncoder as MultiVectorEncoder
from fastformer.encoding.sparse import SparseEmbedding as SparseEmbedding
from fastformer.encoding.token_classifier import TokenClassifier as TokenClassifier
