"""Whole models with a configuration: Transformer (encoder-decoder), GPT (decoder-only) and BERT (encoder-only)."""

from fastformer.models.bert import BERT as BERT
from fastformer.models.bert import BERTConfig as BERTConfig
from fastformer.models.gpt import GPT as GPT
from fastformer.models.gpt import GPTConfig as GPTConfig
from fastformer.models.pretrained import read_architecture as read_architecture
from fastformer.models.transformer import Transformer as Transformer
from fastformer.models.transformer import TransformerConfig as TransformerConfig
from fastformer.special_ids import SpecialIds as SpecialIds
