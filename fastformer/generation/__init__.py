"""Decoding: one search, engines behind it, and the Translator for text."""

from fastformer.generation.generate import GenerateOutput as GenerateOutput
from fastformer.generation.generate import generate as generate
from fastformer.generation.heatmap import draw_attention as draw_attention
from fastformer.generation.settings import GenerationSettings as GenerationSettings
from fastformer.generation.translator import Translator as Translator
