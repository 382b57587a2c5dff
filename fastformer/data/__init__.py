"""From text to batches: readers of files, tokenizers, batching, the built-in task."""

from fastformer.data.batching import Batch as Batch
from fastformer.data.batching import collate as collate
from fastformer.data.batching import plan_epoch as plan_epoch
from fastformer.data.bpe import BPETokenizer as BPETokenizer
from fastformer.data.bpe import train_bpe as train_bpe
from fastformer.data.examples import Example as Example
from fastformer.data.examples import Examples as Examples
from fastformer.data.pair import PairTokenizer as PairTokenizer
from fastformer.data.tokenizer import ByteTokenizer as ByteTokenizer
from fastformer.data.tokenizer import Tokenizer as Tokenizer
from fastformer.data.tokenizer_files import load_tokenizer as load_tokenizer
