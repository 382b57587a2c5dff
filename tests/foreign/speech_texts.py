"""Writes tests/foreign/speech_texts.json: what faster-whisper returns for sounds, with a small random Whisper.

    pip install faster-whisper==1.2.1 ctranslate2==4.8.5 && python -m tests.foreign.speech_texts

The model is tests/audio/speech.py's, converted to CTranslate2; faster-whisper is told that it is multilingual, because
it asks the size of the vocabulary. Speech is told from silence by the energy of each 512 samples.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.audio.speech import LANGUAGES, sound, whisper
from tests.foreign.ctranslate2_folders import save_converted

FILE = Path(__file__).parent / "speech_texts.json"
_USUAL = {"language": "en", "temperature": [0.0], "no_speech_threshold": None, "max_new_tokens": 40, "beam_size": 2}
# Options of `WhisperModel.transcribe` and, below, of `BatchedInferencePipeline.transcribe`.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "words": {"word_timestamps": True},
    "greedy": {"beam_size": 1, "condition_on_previous_text": False},
    "voice": {"vad_filter": True, "word_timestamps": True, "vad_parameters": {"min_silence_duration_ms": 300}},
    "voice without words": {"vad_filter": True},
    "without times": {"without_timestamps": True, "condition_on_previous_text": False},
    "prompts": {"initial_prompt": "a dog, b", "hotwords": "xyz", "task": "translate"},
    "prefix": {"prefix": "a cat", "language": "de"},
    "clips": {"clip_timestamps": "2,6,8"},
    "hallucinations": {"word_timestamps": True, "hallucination_silence_threshold": 0.2},
    "any token": {"suppress_tokens": [], "suppress_blank": False, "patience": 2.0, "length_penalty": 0.5},
    "few tokens": {"max_new_tokens": 9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "late": {"max_initial_timestamp": 3.0, "word_timestamps": True, "prepend_punctuations": "", "language": "fr"},
    "silent": {"no_speech_threshold": 1e-6, "log_prob_threshold": 0.0},
}
BATCHES: dict[str, dict[str, Any]] = {
    "batch": {},
    "batch with times": {"without_timestamps": False, "word_timestamps": True, "initial_prompt": "a dog"},
    "batch of clips": {"clip_timestamps": [{"start": 1.0, "end": 6.0}, {"start": 7.0, "end": 10.5}]},
}


def audio() -> np.ndarray[Any, Any]:
    """Returns sounds with pauses between them, of more than a window."""
    silence = np.zeros(16_000 * 4, np.float32)
    return np.concatenate([sound(11, 1), silence, sound(26.3, 2), silence[:12_345], sound(5, 3)])


def loud(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns 1 for each 512 samples that are loud, 0 for the others."""
    parts = np.pad(samples, (0, -len(samples) % 512)).reshape(-1, 512)
    result: np.ndarray[Any, Any] = (np.square(parts).mean(1) > 1e-3).astype(np.float32)
    return result


def _convert(folder: Path) -> None:
    model, tokenizer = whisper(3000, 448)
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    first, last = names.index("<|startoftranscript|>"), names.index("<|notimestamps|>")

    class Tokens:
        additional_special_tokens_ids = tuple(range(first, last + 1))

        def convert_ids_to_tokens(self, i: int) -> str:
            return str(names[i])

        def convert_tokens_to_ids(self, token: str) -> int:
            return names.index(token)

    languages = [names.index(f"<|{language}|>") for language in LANGUAGES]
    save_converted(folder, "Whisper", model, Tokens(), names, lang_ids=languages)
    tokenizer.save(str(folder / "tokenizer.json"))


class _Multilingual:
    is_multilingual = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def main() -> None:
    import faster_whisper
    import faster_whisper.vad

    with tempfile.TemporaryDirectory() as folder:
        _convert(Path(folder))
        model = faster_whisper.WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=1)
    model.model = _Multilingual(model.model)
    faster_whisper.vad.get_vad_model = lambda: loud
    batched = faster_whisper.BatchedInferencePipeline(model)
    texts = {}
    for name, options in [*CASES.items(), *BATCHES.items()]:
        transcribe = batched.transcribe if name in BATCHES else model.transcribe
        size = {"batch_size": 2} if name in BATCHES else {}
        segments, info = transcribe(audio(), **_USUAL | options | size)
        texts[name] = [info.duration_after_vad, [_plain(segment) for segment in segments]]
    FILE.write_text(json.dumps(texts, ensure_ascii=False, indent=0).replace("\n", "") + "\n", encoding="utf-8")


def _plain(segment: Any) -> list[Any]:
    """Returns the facts of a segment that are compared."""
    words = segment.words and [[word.word, round(word.start, 2), round(word.end, 2)] for word in segment.words]
    times = [round(segment.start, 2), round(segment.end, 2)]
    numbers = [round(float(segment.avg_logprob), 3), round(float(segment.no_speech_prob), 3)]
    return [segment.id, segment.seek, *times, segment.text, list(segment.tokens), *numbers, words]


if __name__ == "__main__":
    main()
