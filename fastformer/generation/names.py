"""The public names of the package, which loads them together on first use."""

from __future__ import annotations

from fastformer.engine.frozen import repack as repack
from fastformer.generation.async_generator import AsyncGenerator as AsyncGenerator
from fastformer.generation.async_translator import AsyncTranslator as AsyncTranslator
from fastformer.generation.chat import Chat as Chat
from fastformer.generation.chat_template import ChatTemplate as ChatTemplate
from fastformer.generation.config import GenerationConfig as GenerationConfig
from fastformer.generation.config import GenerationSettings as GenerationSettings
from fastformer.generation.ensemble import Ensemble as Ensemble
from fastformer.generation.generating import GenerateOutput as GenerateOutput
from fastformer.generation.generating import generate as generate
from fastformer.generation.generator import Generator as Generator
from fastformer.generation.scoring import score as score
from fastformer.generation.sentences import Sentence as Sentence
from fastformer.generation.sentences import split_sentences as split_sentences
from fastformer.generation.streaming import TextStreamer as TextStreamer
from fastformer.generation.translator import Translator as Translator
from fastformer.plots import draw_attention as draw_attention
