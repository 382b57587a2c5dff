"""Writes the folders in tests/foreign/speech: random Whispers, converted and computed by CTranslate2.

    pip install ctranslate2==4.8.5 && python -m tests.foreign.speech_folders

Each folder has CTranslate2's files, and in expected.json what CTranslate2 computes in fp32: the languages and the times
of windows, and the hypotheses of searches, each with its prompt and its options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.audio.whispers import EN, NO_TIMESTAMPS, SOT, TOKENS, TRANSCRIBE, features, whisper
from tests.foreign.ctranslate2_folders import save_converted

FOLDERS = Path(__file__).parent / "speech"
WINDOWS = 6
_PROMPT = [SOT, EN, TRANSCRIBE]
_SHARED = {"max_length": 40, "max_initial_timestamp_index": 10, "return_scores": True, "return_no_speech_prob": True}
SEARCHES: list[tuple[list[int], dict[str, Any]]] = [
    (_PROMPT, {"beam_size": 1}),
    (_PROMPT, {"beam_size": 5, "num_hypotheses": 3}),
    ([*_PROMPT, NO_TIMESTAMPS], {"beam_size": 1}),
    ([*_PROMPT, NO_TIMESTAMPS], {"beam_size": 5, "num_hypotheses": 5}),
    ([SOT], {"beam_size": 2, "max_length": 24, "suppress_tokens": [7]}),
    ([68, 11, 12, *_PROMPT], {"beam_size": 3, "patience": 2.0, "num_hypotheses": 4, "length_penalty": 0.5}),
    (_PROMPT, {"beam_size": 3, "length_penalty": 0.0, "num_hypotheses": 2}),
    ([*_PROMPT, NO_TIMESTAMPS + 1, 20, 21], {"beam_size": 2, "repetition_penalty": 1.3}),
    ([*_PROMPT, NO_TIMESTAMPS], {"beam_size": 2, "no_repeat_ngram_size": 2, "suppress_blank": False}),
]


def write(folder: Path, quantization: str | None) -> None:
    import ctranslate2

    class Tokens:
        additional_special_tokens_ids = tuple(range(SOT, NO_TIMESTAMPS + 1))

        def convert_ids_to_tokens(self, i: int) -> str:
            return TOKENS[i]

        def convert_tokens_to_ids(self, token: str) -> int:
            return TOKENS.index(token)

    languages = [EN, EN + 1, EN + 2]
    save_converted(folder, "Whisper", whisper(), Tokens(), TOKENS, quantization, lang_ids=languages)
    engine = ctranslate2.models.Whisper(str(folder), compute_type="float32")
    states = engine.encode(ctranslate2.StorageView.from_array(features(WINDOWS).numpy()), to_cpu=True)
    searches = []
    for prompt, options in SEARCHES:
        results = engine.generate(states, [prompt] * WINDOWS, **_SHARED | options)
        found = [[each.sequences_ids, each.scores, each.no_speech_prob] for each in results]
        searches.append({"prompt": prompt, "options": _SHARED | options, "results": found})
    texts, frames = [[1, 2, 3, 4], [9, 8], [], [30] * 12, [5], [6, 7]], [48, 40, 30, 48, 12, 20]
    times = engine.align(states, _PROMPT, texts, frames)
    expected = {
        "states": np.asarray(states)[0, :2].tolist(),
        "languages": [[[token, p] for token, p in row] for row in engine.detect_language(states)],
        "searches": searches,
        "texts": texts,
        "frames": frames,
        "times": [[each.alignments, each.text_token_probs] for each in times],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    for name, quantization in (("fp16", "float16"), ("int8", "int8")):
        write(FOLDERS / name, quantization)
