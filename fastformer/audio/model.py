"""Whisper on the C++ engine: from features to states, and from states to tokens, languages and the times of tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastformer.checkpoints.model_bin import widened
from fastformer.checkpoints.speech import SpeechWeights
from fastformer.extension import extension_module, num_threads

PRECISIONS = ("auto", "fp32", "bf16", "int8")
_SLICE = 0.2  # seconds between two looks at signals
_SHARE = 0.6  # the power of an output column's size that the norm takes over
_REACH = 3  # times before and after one whose weights' median counts for it
_ROWS = 4096  # rows of a matrix to change at once

Floats = npt.NDArray[np.float32]


class SpeechResult(NamedTuple):
    """The hypotheses of a window.

    Attributes:
        sequences_ids: the tokens of each hypothesis, best first, without <|endoftext|>.
        scores: the sum of the log-probabilities of each, divided by its length ** length_penalty; empty unless asked.
        no_speech_prob: the probability of <|nospeech|> after <|startoftranscript|>; 0 unless asked.
    """

    sequences_ids: list[list[int]]
    scores: list[float]
    no_speech_prob: float


class AlignmentResult(NamedTuple):
    """The times of a window's tokens.

    Attributes:
        alignments: pairs of an index of a token and an index of a time, of 0.02 s, along the best path.
        text_token_probs: the probability of each token.
    """

    alignments: list[tuple[int, int]]
    text_token_probs: list[float]


class SpeechModel:
    """Whisper, with the methods of `ctranslate2.models.Whisper`.

    The results of a window are the same, bit for bit, whatever the other windows and the number of threads. Several
    threads may use one model at once.

    Args:
        weights: the config and the tensors.
        precision: "fp32", "bf16" or "int8"; "auto": that of the file, and fp32 for a file of float16.
        num_threads: the number of threads; None: that of PyTorch.

    Attributes:
        config: the sizes and the special tokens.
        precision: the precision of the products.
    """

    def __init__(self, weights: SpeechWeights, *, precision: str = "auto", num_threads: int | None = None) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {PRECISIONS}, got {precision!r:.60}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads: expected at least 1, got {num_threads}")
        self.config = weights.config
        self.precision = weights.precision if precision == "auto" else precision
        self._num_threads = num_threads
        self._extension = extension_module()
        config = weights.config
        # One side after the other, the larger one first: fewer arrays of the file are in memory at once.
        decoder = weights.read("decoder")
        if self.precision == "int8" != weights.precision:  # a file of int8 keeps its numbers
            _even_out(decoder)
        self._decoder = self._packed(decoder, config.decoder_heads, 0, config.decoder_layers)
        del decoder
        encoder = self._packed(weights.read("encoder"), config.encoder_heads, config.encoder_layers, 0)
        self._encoder = self._extension.Encoder(encoder)

    def _packed(self, arrays: dict[str, npt.NDArray[Any]], heads: int, encoder_layers: int, decoder_layers: int) -> Any:
        config = self.config
        options = {
            "precision": self.precision,
            "d_model": config.d_model,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": config.d_model // heads,
            "num_encoder_layers": encoder_layers,
            "num_decoder_layers": decoder_layers,
            "norm_placement": "pre",
            "is_bare": True,
            "eps": 1e-5,
            "scale": config.scale,
            "attention_scale": (config.d_model // heads) ** -0.5,
            "encoder_windows": [-1] * encoder_layers,
            "decoder_windows": [-1] * decoder_layers,
            "max_len": max(config.max_frames // 2, config.max_length),
            "activation": config.activation,
            "fine_decoder": True,
        }
        return self._extension.PackedModel(options, arrays)

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows languages and tasks."""
        return self.config.is_multilingual

    @property
    def threads(self) -> int:
        """The number of threads of a call."""
        return self._num_threads or num_threads()

    def encode(self, features: npt.ArrayLike) -> Floats:
        """Encodes windows.

        Args:
            features: log-mel features, (windows, n_mels, frames), of at most `config.max_frames` frames.

        Returns:
            The states, (windows, frames / 2 rounded up, d_model) fp32.

        Raises:
            ValueError: another shape, or features that are NaN or infinite.
        """
        array = _floats("features", features)
        config = self.config
        if array.shape[1] != config.n_mels or not 1 <= array.shape[2] <= config.max_frames:
            raise ValueError(
                f"features: expected shape (windows, {config.n_mels}, 1 to {config.max_frames}), got {array.shape}"
            )
        if not np.isfinite(array).all():
            raise ValueError("features: expected finite numbers, got NaN or infinity")
        if not len(array):
            return np.empty((0, (array.shape[2] + 1) // 2, config.d_model), np.float32)
        states: Floats = self._encoder.encode_features(array, self.threads)
        return states.reshape(len(array), -1, config.d_model)

    def _states(self, states: npt.ArrayLike) -> Floats:
        array, config = _floats("states", states), self.config
        if array.shape[2] != config.d_model or not 1 <= array.shape[1] <= config.max_frames // 2:
            raise ValueError(
                f"states: expected shape (windows, 1 to {config.max_frames // 2}, {config.d_model}), got {array.shape}"
            )
        return array

    def new_session(self, states: npt.ArrayLike, prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
        """Returns a session with the keys and values of states and prompts, and room for more tokens."""
        room = sum(len(prompt) + 32 for prompt in prompts) + num_tokens
        session = self._extension.Session(self._decoder, room)
        session.admit_states(self._states(states), [list(prompt) for prompt in prompts], self.threads)
        return session

    def detect_language(self, states: npt.ArrayLike) -> list[list[tuple[str, float]]]:
        """Returns the languages of each window, as tokens such as "<|en|>", with their probabilities, best first.

        Raises:
            ValueError: the model knows one language.
        """
        if not self.config.is_multilingual:
            raise ValueError("expected a multilingual model to detect a language, got one of English alone")
        array = self._states(states)
        if not (rows := len(array)):
            return []
        session = self.new_session(array, [[]] * rows, 16 * rows)
        logits = np.empty((rows, self.config.vocab_size), np.float32)
        session.step([self.config.sot] * rows, 1, False, [*range(rows)], logits, self.threads)
        probabilities = _softmax(logits[:, [*self.config.lang_ids]]).tolist()
        tokens = [*self.config.languages.values()]
        return [sorted(zip(tokens, row, strict=True), key=lambda pair: -pair[1]) for row in probabilities]

    def generate(
        self,
        states: npt.ArrayLike,
        prompts: Sequence[Sequence[int]],
        *,
        beam_size: int = 5,
        patience: float = 1.0,
        num_hypotheses: int = 1,
        length_penalty: float = 1.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        max_length: int = 448,
        return_scores: bool = False,
        return_no_speech_prob: bool = False,
        suppress_blank: bool = True,
        suppress_tokens: Sequence[int] | None = (-1,),
        max_initial_timestamp_index: int = 50,
        sampling_topk: int = 1,
        sampling_temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> list[SpeechResult]:
        """Transcribes or translates windows; the arguments are those of `ctranslate2.models.Whisper.generate`.

        Args:
            states: the states of the windows.
            prompts: the tokens before the text of each window: earlier text, if any, <|startoftranscript|>, language
                and task in a multilingual model, <|notimestamps|> for text without them, and the beginning of the text,
                which the results repeat.
            beam_size: the number of beams; 1: the best token, or sampling.
            patience: the search ends after beam_size * patience hypotheses.
            num_hypotheses: the number of results of each window.
            length_penalty: the exponent of the length that divides a score.
            repetition_penalty: divides or multiplies the logits of earlier tokens.
            no_repeat_ngram_size: n-grams of this size don't repeat; 0: they may.
            max_length: the largest number of tokens, of which the text has half or what the prompt leaves.
            return_scores, return_no_speech_prob: see `SpeechResult`.
            suppress_blank: forbids a blank or the end as the first token.
            suppress_tokens: forbidden ids; -1 stands for those of the model's config.
            max_initial_timestamp_index: the latest first timestamp, in steps of 0.02 s.
            sampling_topk: 1: no sampling; with beam_size=1, sampling from so many best tokens, 0: from all.
            sampling_temperature: divides the logits that sampling draws from.
            seed: of sampling: one for each window, or that of the first, which the others count on from; None: a random
                one.

        Raises:
            ValueError: options that don't fit together, or prompts that are too long or have no
                <|startoftranscript|>.
        """
        array, config = self._states(states), self.config
        if len(array) != len(prompts):
            raise ValueError(f"prompts: expected one for each of {len(array)} windows, got {len(prompts)}")
        samples = sampling_topk != 1 and sampling_temperature != 0
        most_finished = round(beam_size * patience)
        _check_search(beam_size, most_finished, num_hypotheses, sampling_topk if samples else 1)
        if sampling_temperature < 0 or sampling_topk < 0 or repetition_penalty <= 0 or no_repeat_ngram_size < 0:
            raise ValueError(
                "expected a repetition_penalty above 0, and sampling_temperature, sampling_topk and "
                "no_repeat_ngram_size of at least 0"
            )
        options = {
            "num_beams": beam_size,
            "num_return": num_hypotheses,
            "alpha": length_penalty,
            "most_finished": most_finished,
            "suppressed": self._suppressed(suppress_tokens or ()),
            "suppressed_first": [*config.suppress_ids_begin] if suppress_blank else [],
            "repetition_penalty": repetition_penalty,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "max_initial_timestamp": config.timestamp_begin + max_initial_timestamp_index,
            "top_k": min(sampling_topk, config.vocab_size) if samples else 1,
            "temperature": sampling_temperature or 1.0,
            "eos": config.eot,
            "probed_token": config.no_speech if return_no_speech_prob else -1,
            "probed_at": config.sot,
        }
        if not isinstance(seed, Sequence):
            first = secrets.randbits(62) if seed is None else seed
            seed = range(first, first + len(prompts))
        if len(seed) != len(prompts):
            raise ValueError(f"seed: expected one for each of {len(prompts)} windows, got {len(seed)}")
        plans = [self._plan(prompt, max_length) for prompt in prompts]
        searches = [
            self._extension.ruled_search(seed=one % 2**63, **options, **plan._asdict())
            for one, plan in zip(seed, plans, strict=True)
        ]
        if not searches:
            return []
        rows = num_hypotheses if samples else beam_size
        session = self.new_session(
            array, [prompt[:-1] for prompt in prompts], sum(2 * rows * (plan.limit + 32) for plan in plans)
        )
        _run(self._extension, session, searches, [prompt[-1] for prompt in prompts], self.threads)
        return [
            _result(search, plan.prefix, config.eot, length_penalty, return_scores)
            for search, plan in zip(searches, plans, strict=True)
        ]

    def _suppressed(self, ids: Sequence[int]) -> list[int]:
        config = self.config
        suppressed = dict.fromkeys(i for i in ids if i >= 0) | dict.fromkeys(config.suppress_ids if -1 in ids else ())
        if wrong := [i for i in suppressed if i >= config.vocab_size]:
            raise ValueError(f"suppress_tokens: expected ids below {config.vocab_size}, got {wrong[:5]}")
        return [*suppressed]

    def _plan(self, prompt: Sequence[int], max_length: int) -> _Plan:
        """Reads a prompt: the place of <|startoftranscript|>, the tasks after it, and the beginning of the text."""
        config = self.config
        if config.sot not in prompt:
            raise ValueError(f"prompts: expected the <|startoftranscript|> {config.sot} in each, got {[*prompt]!r:.80}")
        if wrong := [i for i in prompt if not 0 <= i < config.vocab_size]:
            raise ValueError(f"prompts: expected ids from 0 to {config.vocab_size - 1}, got {wrong[:5]}")
        start = end = [*prompt].index(config.sot)
        while end < len(prompt) and config.sot <= prompt[end] <= config.no_timestamps:
            end += 1
        prefix = [*prompt[end:]]
        limit = min(max_length // 2, min(max_length, config.max_length) - end + 1) - len(prefix)
        if limit < 1:
            raise ValueError(
                f"prompts: expected so few tokens that a text of at most {max_length // 2} tokens fits into max_length="
                f"{min(max_length, config.max_length)}, got {len(prompt)}"
            )
        is_last = start == len(prompt) - 1
        timestamp_begin = -1 if prompt[end - 1] == config.no_timestamps else config.timestamp_begin
        return _Plan(limit, prefix, timestamp_begin, -1 if is_last else start)

    def align(
        self,
        states: npt.ArrayLike,
        start_sequence: Sequence[int],
        text_tokens: Sequence[Sequence[int]],
        num_frames: int | Sequence[int],
    ) -> list[AlignmentResult]:
        """Finds the time of each token by dynamic time warping over the alignment heads.

        Args:
            states: the states of the windows.
            start_sequence: <|startoftranscript|>, and the language and the task.
            text_tokens: the tokens of each window's text, without timestamps.
            num_frames: the number of frames with sound in each window, or in all.

        Raises:
            ValueError: lists of different lengths, tokens outside of the vocabulary, or texts that are too long.
        """
        array, config = self._states(states), self.config
        frames = [num_frames] * len(array) if isinstance(num_frames, int) else [*num_frames]
        if not len(array) == len(text_tokens) == len(frames):
            raise ValueError(
                f"expected text_tokens and num_frames for {len(array)} windows, got {len(text_tokens)} and "
                f"{len(frames)}"
            )
        if not config.alignment_heads:
            raise ValueError("expected alignment_heads in the model's config, got none")
        results = []
        for window, text, count in zip(array, text_tokens, frames, strict=True):
            tokens = [*start_sequence, config.no_timestamps, *text, config.eot]
            if len(tokens) > config.max_length:
                raise ValueError(f"text_tokens: expected at most {config.max_length} tokens, got {len(tokens)}")
            session = self.new_session(window[None], [tokens], 0)
            probabilities, scores = session.align(
                group=0,
                source=window.shape[0],
                tokens=tokens,
                targets=[*tokens[1:], 0],
                end=config.eot,
                heads=[*config.alignment_heads],
                threads=self.threads,
            )
            offset = len(start_sequence)
            weights = scores.reshape(len(config.alignment_heads), len(tokens), -1)
            weights = weights[..., : max(0, count) // 2] * np.float32((config.d_model // config.decoder_heads) ** -0.5)
            path = _warp(self._extension, weights, offset, len(text) + 1)
            results.append(AlignmentResult(path, probabilities[0, offset : offset + len(text)].tolist()))
        return results


def _even_out(arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Moves the sizes of the output layer's columns to the norm before it, which leaves the logits as they are.

    A few columns of Whisper's are many times as large as the others, and a row of the layer has one scale in int8.
    Larger differences between the columns of its inputs cost little, because these have 16 bits.
    """
    matrix = arrays["output"]
    pieces = [slice(first, first + _ROWS) for first in range(0, len(matrix), _ROWS)]
    largest = np.max([np.abs(widened(matrix[piece])).max(0) for piece in pieces], 0)
    factors = np.where((largest > 0) & np.isfinite(largest), largest, 1) ** _SHARE
    factors /= np.exp(np.log(factors).mean())  # fp16 holds the result
    even = np.empty(matrix.shape, np.float16 if matrix.dtype == np.float16 else np.float32)
    for piece in pieces:
        even[piece] = widened(matrix[piece]) / factors
    norm = {name: widened(arrays[name]) * factors for name in ("decoder.norm.weight", "decoder.norm.bias")}
    arrays |= norm | {"output": even}


class _Plan(NamedTuple):
    """What a search takes of its prompt, by the names of the engine's arguments."""

    limit: int
    prefix: list[int]
    timestamp_begin: int
    probed_position: int


def _check_search(beam_size: int, most_finished: int, num_hypotheses: int, topk: int) -> None:
    """Raises ValueError if the sizes of a search don't fit together; topk: of sampling, or 1."""
    if topk != 1 and beam_size != 1:
        raise ValueError(f"beam_size: expected 1 for sampling with sampling_topk={topk}, got {beam_size}")
    if beam_size < 1 or most_finished < 1:
        raise ValueError(f"beam_size: expected at least 1, also times patience, got {beam_size} and {most_finished}")
    if num_hypotheses < 1 or (topk == 1 and num_hypotheses > most_finished):
        raise ValueError(f"num_hypotheses: expected 1 to beam_size * patience, got {num_hypotheses}")


def _floats(name: str, values: npt.ArrayLike) -> Floats:
    array = np.asarray(values)
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name}: expected a float array of three dimensions, got {array.dtype} of {array.shape}")
    return np.ascontiguousarray(array, np.float32)


def _run(extension: Any, session: Any, searches: Sequence[Any], tokens: list[int], threads: int) -> None:
    """Runs searches to their ends; between slices of time, Python can raise a KeyboardInterrupt."""
    left = [*searches]
    while left:
        steps = session.run(left, tokens, 2**31 - 1, _SLICE, 0, False, threads)
        done = extension.places_of_done(left)
        if not done and not any(steps):
            raise RuntimeError("expected room in the cache for the next tokens, got none")
        session.release(done)
        if any(left[place].is_broken for place in done):
            raise RuntimeError("expected finite logits, got NaN or infinity: are the states of this model?")
        left = [search for place, search in enumerate(left) if place not in done]
        tokens = extension.last_tokens(left) if left else []


def _result(search: Any, prefix: list[int], eot: int, length_penalty: float, has_scores: bool) -> SpeechResult:
    sequences, scores = [], []
    for tokens, log_probs, _ in search.results():
        sequences.append([*prefix, *(tokens[:-1] if tokens[-1:] == [eot] else tokens)])
        scores.append(sum(log_probs) / max(1, len(sequences[-1])) ** length_penalty)
    return SpeechResult(sequences, scores if has_scores else [], search.probed)


def _softmax(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = np.exp(values - values.max(-1, keepdims=True))
    values /= values.sum(-1, keepdims=True)
    return values


def _warp(extension: Any, scores: Floats, first: int, count: int) -> list[tuple[int, int]]:
    """Returns the best path through the weights of (heads, tokens, times) for `count` tokens from `first` on."""
    if scores.shape[-1] == 0:
        return []
    weights = _softmax(scores.astype(np.float64))  # the squares of small weights are no numbers of fp32
    weights -= weights.mean(-2, keepdims=True)
    deviation = np.sqrt(np.square(weights).mean(-2, keepdims=True))
    weights /= np.where(deviation > 0, deviation, 1)  # tokens that attend alike tell no time
    weights = weights[:, first : first + count].astype(np.float32)
    if scores.shape[-1] > _REACH:
        padded = np.pad(weights, ((0, 0), (0, 0), (_REACH, _REACH)), mode="reflect")
        weights = np.sort(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1, -1), -1)[..., _REACH]
    path: list[tuple[int, int]] = extension.warp(np.ascontiguousarray(weights.mean(0)))
    return path
