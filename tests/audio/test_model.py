"""`SpeechModel` computes what transformers and CTranslate2 do, alone and in batches, and refuses what it can't."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.audio.model import SpeechModel
from fastformer.checkpoints.ctranslate2 import as_tensors
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.speech import SpeechWeights, from_state, is_speech_folder, load_speech
from fastformer.extension import cpu_flags
from tests.audio.speech import FOREIGN
from tests.audio.whispers import EN, EOT, NO_TIMESTAMPS, SOT, TRANSCRIBE, VOCAB, features, states_of, whisper
from tests.checkpoints.test_ctranslate2 import written
from tests.checks import assert_accurate
from tests.covering import each

PROMPT = [SOT, EN, TRANSCRIBE]


@pytest.fixture(scope="module")
def speech() -> SpeechModel:
    return SpeechModel(load_speech(FOREIGN / "fp16"), precision="fp32")


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same model in transformers."""
    pytest.importorskip("transformers")
    model = whisper()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.half())
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a folder, to change."""
    return Path(shutil.copytree(FOREIGN / "int8", tmp_path / "int8"))


@pytest.mark.parametrize("frames", [48, 47, 2, 1])
def test_states_are_as_accurate_as_transformers(plain: Any, speech: SpeechModel, frames: int) -> None:
    inputs = features(2, frames)
    exact = states_of(copy.deepcopy(plain).double(), inputs.double())
    assert_accurate(torch.from_numpy(speech.encode(inputs)), states_of(plain, inputs), exact)


@pytest.mark.parametrize(("mels", "encoder", "decoder"), [(128, 4, 2), (128, 3, 4), (80, 1, 3)])
def test_turbo_and_distilled_models(mels: int, encoder: int, decoder: int) -> None:
    pytest.importorskip("transformers")
    model = whisper(num_mel_bins=mels, encoder_layers=encoder, decoder_layers=decoder)
    speech = SpeechModel(from_transformers(model, {}, {}), precision="fp32")
    inputs = features(1).tile(1, mels // 8, 1) * torch.linspace(0.3, 1, mels)[:, None]
    states = speech.encode(inputs)
    exact = states_of(copy.deepcopy(model).double(), inputs.double())
    assert_accurate(torch.from_numpy(states), states_of(model, inputs), exact)
    tokens = [*PROMPT, NO_TIMESTAMPS]
    (result,) = speech.generate(states, [tokens], beam_size=1, max_length=24, suppress_tokens=[], suppress_blank=False)
    for token in [*result.sequences_ids[0], EOT][:12]:
        with torch.no_grad():
            logits = model(encoder_outputs=(torch.from_numpy(states),), decoder_input_ids=torch.tensor([tokens])).logits
        assert int(logits[0, -1].argmax()) == token
        tokens.append(token)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_sides_of_ctranslate2_may_have_other_numbers_of_layers(side: str, tmp_path: Path) -> None:
    whole, folder = load_speech(FOREIGN / "fp16"), Path(shutil.copytree(FOREIGN / "fp16", tmp_path / "model"))
    spec, arrays = read_variables(folder / MODEL)
    less = {name: tensor for name, tensor in as_tensors(arrays).items() if not name.startswith(f"{side}/layer_1/")}
    (folder / MODEL).write_bytes(written(less, spec))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "alignment_heads": [[0, 1]]}))
    config, _, read = load_speech(folder)
    assert (config.encoder_layers, config.decoder_layers) == ((1, 2) if side == "encoder" else (2, 1))
    for part in ("encoder", "decoder"):
        expected = {name: a for name, a in whole.read(part).items() if not name.startswith(f"{side}.layers.1.")}
        found = read(part)
        assert [*found] == [*expected] and all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.03), ("int8", 0.05)])
def test_rounded_states_are_near(speech: SpeechModel, precision: str, bound: float) -> None:
    exact = speech.encode(features(2))
    ours = SpeechModel(load_speech(FOREIGN / "fp16"), precision=precision).encode(features(2))
    assert 0 < np.linalg.norm(ours - exact) / np.linalg.norm(exact) < bound


def rounded_logits(model: Any, rows: int) -> np.ndarray[Any, Any]:
    """Returns the largest error of each row's logits in int8, as a share of the largest logit."""
    tokens = [(7 * row) % EOT for row in range(rows)]
    logits = {precision: np.empty((rows, VOCAB), np.float32) for precision in ("fp32", "int8")}
    for precision, to in logits.items():
        speech = SpeechModel(from_transformers(model, {}, {}), precision=precision)
        session = speech.new_session(np.ones((rows, 24, 16), np.float32), [[]] * rows, 16 * rows)
        session.step(tokens, 1, False, [*range(rows)], to, 1)
    return np.abs(logits["int8"] - logits["fp32"]).max(1) / np.abs(logits["fp32"]).max(1)


@torch.no_grad()
def without_attention(model: Any) -> Any:
    """Gives a decoder layers whose attention adds nothing, and embeddings of 8 bits."""
    for layer in model.model.decoder.layers:
        for last in (layer.self_attn.out_proj, layer.encoder_attn.out_proj):
            last.weight.zero_(), last.bias.zero_()
    model.model.decoder.embed_positions.weight.copy_(model.model.decoder.embed_positions.weight.bfloat16())
    to_8_bits(model.model.decoder.embed_tokens.weight)
    return model


@torch.no_grad()
def to_8_bits(weight: torch.Tensor) -> None:
    weight.copy_((weight / weight.abs().amax(1, keepdim=True) * 127).round() / 64)


@pytest.mark.parametrize("rows", [1, 3, 8, 40])  # dot products, and tiles
@pytest.mark.parametrize("reads", ["output", "feed forward"])
def test_the_decoder_of_int8_reads_rows_of_16_bits(reads: str, rows: int) -> None:
    pytest.importorskip("transformers")
    model = without_attention(whisper())
    with torch.no_grad():  # all weights have 8 bits: only rows are rounded
        model.model.decoder.embed_tokens.weight[0] = 127 / 64  # the columns are alike
        for layer in model.model.decoder.layers:
            if reads == "output":
                layer.fc2.weight.zero_(), layer.fc2.bias.zero_()
            to_8_bits(layer.fc1.weight), to_8_bits(layer.fc2.weight) if reads != "output" else None
    assert rounded_logits(model, rows).max() < 2e-4  # rows of 8 bits: about 5e-3


@pytest.mark.parametrize("positions", [255, 256, 300])  # of the encoder; CPUs may attend to the last two in 8 bits
def test_int8_attends_to_long_states_as_well_as_to_short_ones(positions: int) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    states, tokens = torch.randn(6, positions, 16).numpy(), [7, 6, 5, 4, 3, 2]
    logits = []
    for precision in ("fp32", "int8"):
        speech = SpeechModel(from_transformers(whisper(max_source_positions=300), {}, {}), precision=precision)
        prompts = [[1], [], [2, 9], [], [8], [3]]

        def of(rows: list[int], speech: Any = speech, prompts: Any = prompts) -> Any:
            session = speech.new_session(states[rows], [prompts[row] for row in rows], 96)
            found = np.empty((len(rows), VOCAB), np.float32)
            session.step([tokens[row] for row in rows], 1, False, [*range(len(rows))], found, 1)
            return found

        logits.append(of([*range(6)]))
        assert of([4]).tobytes() == logits[-1][4:5].tobytes() and of([5, 0]).tobytes() == logits[-1][[5, 0]].tobytes()
    error = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
    assert 0 < error < 0.1


def test_a_large_column_of_the_output_costs_int8_little() -> None:
    pytest.importorskip("transformers")
    model = without_attention(whisper())
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc2.weight.zero_(), layer.fc2.bias.zero_()
        norm = model.model.decoder.layer_norm
        model.model.decoder.embed_tokens.weight[:, 3] *= 64
        norm.weight[3] /= 64
        norm.bias[3] /= 64
    assert rounded_logits(model, 8).max() < 0.03  # 0.17 if the columns keep their sizes


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_results_are_those_of_ctranslate2(name: str) -> None:
    expected = json.loads((FOREIGN / name / "expected.json").read_text())
    speech = SpeechModel(load_speech(FOREIGN / name), precision="fp32")
    states = speech.encode(features(6))
    np.testing.assert_allclose(states[0, :2], expected["states"], rtol=1e-4, atol=1e-4)
    for languages, row in zip(speech.detect_language(states), expected["languages"], strict=True):
        assert [token for token, _ in languages] == [token for token, _ in row]
        np.testing.assert_allclose([p for _, p in languages], [p for _, p in row], rtol=1e-3)
    for case in expected["searches"]:
        results = speech.generate(states, [case["prompt"]] * 6, **case["options"])
        for result, (sequences, scores, no_speech) in zip(results, case["results"], strict=True):
            assert result.sequences_ids == sequences, case["options"]
            np.testing.assert_allclose(result.scores, scores, rtol=1e-3)
            np.testing.assert_allclose(result.no_speech_prob, no_speech, rtol=1e-3)
    times = speech.align(states, PROMPT, expected["texts"], expected["frames"])
    for found, (path, probabilities) in zip(times, expected["times"], strict=True):
        assert found.alignments == [tuple(pair) for pair in path]
        np.testing.assert_allclose(found.text_token_probs, probabilities, rtol=1e-3)


@pytest.mark.parametrize("factor", [5, 1000])
def test_times_are_within_a_window_whose_weights_underflow(speech: SpeechModel, factor: int) -> None:
    states = speech.encode(features(2)) * factor
    for found in speech.align(states, PROMPT, [[1, 2, 3], [9]], [48, 30]):
        places, times = zip(*found.alignments, strict=True)
        assert min(times) == 0 and {*np.diff(times), *np.diff(places)} <= {0, 1}


def test_folders_of_transformers_give_the_same(plain: Any, speech: SpeechModel, tmp_path: Path) -> None:
    plain.save_pretrained(tmp_path)
    loaded = SpeechModel(load_speech(tmp_path), precision="fp32")
    converted = SpeechModel(from_transformers(plain, {}, {}), precision="fp32")
    states = speech.encode(features(3))
    assert all(np.array_equal(each.encode(features(3)), states) for each in (loaded, converted))
    assert loaded.generate(states, [PROMPT] * 3, max_length=40) == speech.generate(states, [PROMPT] * 3, max_length=40)
    assert loaded.detect_language(states) == speech.detect_language(states)
    assert loaded.config.suppress_ids == speech.config.suppress_ids == converted.config.suppress_ids


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_windows_and_threads_do_not_change_bits(precision: str) -> None:
    speech = SpeechModel(load_speech(FOREIGN / "fp16"), precision=precision, num_threads=1)
    together = SpeechModel(load_speech(FOREIGN / "fp16"), precision=precision, num_threads=2)
    states = together.encode(features(20))
    prompts = [PROMPT, [SOT], [*PROMPT, NO_TIMESTAMPS, 4, 5], [68, 9, 8, 7, *PROMPT]] * 5
    options: list[dict[str, Any]] = [
        {"beam_size": 1, "return_scores": True, "return_no_speech_prob": True},
        {"beam_size": 3, "num_hypotheses": 2, "return_scores": True, "return_no_speech_prob": True},
    ]
    results = [together.generate(states, prompts, max_length=40, **each) for each in options]
    for i in range(0, 20, 3):
        assert np.array_equal(states[i], speech.encode(features(20)[i : i + 1])[0])
        for chosen, batch in zip(options, results, strict=True):
            assert speech.generate(states[i : i + 1], [prompts[i]], max_length=40, **chosen) == [batch[i]]


def test_sampling_draws_by_seed_and_temperature(speech: SpeechModel) -> None:
    states, options = speech.encode(features(2)), {"beam_size": 1, "max_length": 40, "return_scores": True}
    draws = [
        speech.generate(states, [PROMPT] * 2, sampling_topk=0, num_hypotheses=5, seed=seed, **options)
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]
    for result in draws[0]:
        assert len({tuple(ids) for ids in result.sequences_ids}) > 1
        assert result.scores == sorted(result.scores, reverse=True)
    best = speech.generate(states, [PROMPT] * 2, **options)
    cold = speech.generate(states, [PROMPT] * 2, sampling_topk=0, sampling_temperature=1e-5, seed=1, **options)
    only = speech.generate(states, [PROMPT] * 2, sampling_topk=0, sampling_temperature=0, **options)
    assert cold == best == only
    few = speech.generate(states, [PROMPT] * 2, sampling_topk=2, sampling_temperature=5.0, seed=1, **options)
    assert few != best


def test_draws_have_the_probabilities_of_the_model(speech: SpeechModel, plain: Any) -> None:
    states = speech.encode(features(1))
    results = speech.generate(
        states, [[*PROMPT, NO_TIMESTAMPS]], beam_size=1, num_hypotheses=4000, sampling_topk=0, max_length=8, seed=0,
        sampling_temperature=1.5, suppress_tokens=[], suppress_blank=False,
    )  # fmt: skip
    firsts = [ids[0] if ids else EOT for ids in results[0].sequences_ids]
    with torch.no_grad():
        tokens = torch.tensor([[*PROMPT, NO_TIMESTAMPS]])
        probabilities = (
            plain(encoder_outputs=(torch.from_numpy(states),), decoder_input_ids=tokens).logits[0, -1] / 1.5
        ).softmax(-1)
    frequencies = torch.bincount(torch.tensor(firsts), minlength=VOCAB) / 4000
    assert float((frequencies - probabilities).abs().max()) < 0.04


def test_the_older_name_of_silence_is_known(folder: Path) -> None:
    path, expected = folder / "vocabulary.json", SpeechModel(load_speech(folder)).config.no_speech
    path.write_text(path.read_text().replace("<|nospeech|>", "<|nocaptions|>"))
    assert SpeechModel(load_speech(folder)).config.no_speech == expected


def test_bad_calls_are_refused(speech: SpeechModel) -> None:
    states = speech.encode(features(2))
    broken = features(1)
    broken[0, 3, 5] = float("nan")
    for wrong in (broken, features(1)[0], features(1)[:, :7], torch.ones(1, 8, 49), torch.ones(1, 8, 0)):
        with pytest.raises(ValueError, match="features"):
            speech.encode(wrong)
    for shape in (states[0], states[..., :8], np.ones((2, 25, 16))):
        with pytest.raises(ValueError, match="states"):
            speech.generate(shape, [PROMPT] * len(shape))
    for prompt in ([EN], [], [*PROMPT, VOCAB], [SOT, *[1] * 40], [68, *[1] * 40, SOT], [SOT, *[1] * 20]):
        with pytest.raises(ValueError, match="prompts"):
            speech.generate(states[:1], [prompt], max_length=40)
    bad: list[dict[str, Any]] = [
        {"beam_size": 0}, {"patience": 0}, {"num_hypotheses": 6}, {"num_hypotheses": 0}, {"sampling_topk": 3},
        {"suppress_tokens": [VOCAB]}, {"repetition_penalty": 0}, {"no_repeat_ngram_size": -1}, {"max_length": 1},
        {"sampling_temperature": -1.0},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(ValueError, match=next(iter(options))):
            speech.generate(states[:1], [PROMPT], **{"max_length": 40} | options)
    with pytest.raises(ValueError, match="prompts"):
        speech.generate(states, [PROMPT])
    for seed in ([], [1, 2]):
        with pytest.raises(ValueError, match="seed"):
            speech.generate(states[:1], [PROMPT], max_length=40, seed=seed)
    with pytest.raises(ValueError, match="tokens"):
        speech.align(states[:1], PROMPT, [[1] * 40], 48)
    with pytest.raises(ValueError):
        speech.align(states, PROMPT, [[1]], 48)
    with pytest.raises(ValueError, match="precision"):
        SpeechModel(load_speech(FOREIGN / "fp16"), precision="int4")
    with pytest.raises(RuntimeError, match="finite"):
        speech.generate(states * float("nan"), [PROMPT] * 2, max_length=40)
    empty = speech.encode(features(0))
    assert not len(empty) and speech.generate(empty, []) == [] and speech.detect_language(empty) == []


def test_a_vocabulary_without_a_mark_is_named(folder: Path) -> None:
    path = folder / "vocabulary.json"
    text = path.read_text()
    for mark in ("startoftranscript", "endoftext", "nospeech", "notimestamps"):
        path.write_text(text.replace(f"<|{mark}|>", "<|other|>"))
        with pytest.raises(ValueError, match=rf"token <\|{mark}\|>"):
            load_speech(folder)


def test_folders_that_are_no_whisper_are_refused(folder: Path, tmp_path: Path) -> None:
    assert is_speech_folder(folder) and not is_speech_folder(tmp_path)
    others = FOREIGN.parent / "ctranslate2" / "marian"
    assert not is_speech_folder(others)
    for wrong in (others, tmp_path, tmp_path / "none"):
        with pytest.raises((ValueError, OSError)):
            SpeechModel(load_speech(wrong))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="whisper"):
        SpeechModel(load_speech(tmp_path))
    (folder / "vocabulary.json").write_text(json.dumps(["a", "b"]))
    with pytest.raises(ValueError, match="vocabulary"):
        SpeechModel(load_speech(folder))


def from_transformers(plain: Any, settings: dict[str, Any], search: dict[str, Any]) -> SpeechWeights:
    """Converts a model with other settings, of which None is an omitted one."""
    parts = (plain.config.to_dict() | settings, plain.generation_config.to_dict() | search)
    config, search = ({name: value for name, value in part.items() if value is not None} for part in parts)
    return from_state(config, search, plain.state_dict())


@each("settings, search, told", [
    ({"activation_function": "none"}, {}, "activation_function"), ({"num_mel_bins": 40}, {}, "mel bins"),
    ({"decoder_attention_heads": 3}, {}, "heads"), ({"encoder_attention_heads": 3}, {}, "heads"),
    ({}, {"alignment_heads": [[9, 0]]}, "alignment"), ({}, {"alignment_heads": [[0, 9]]}, "alignment"),
    ({}, {"alignment_heads": [[-1, 0]]}, "alignment"),
    ({"decoder_attention_heads": 4}, {"alignment_heads": [[2, 0]]}, "alignment"),
    ({}, {"suppress_tokens": [VOCAB]}, "special"),
    ({}, {"begin_suppress_tokens": [VOCAB]}, "special"), ({}, {"eos_token_id": VOCAB}, "special"),
    ({}, {"decoder_start_token_id": -1}, "special"), ({}, {"no_timestamps_token_id": VOCAB - 1}, "timestamps"),
    ({}, {"lang_to_id": {"<|en|>": VOCAB}}, "special"),
    ({}, {"no_timestamps_token_id": None, "lang_to_id": None}, "no_timestamps_token_id"),
])  # fmt: skip
def test_settings_of_another_model_are_named(plain: Any, settings: Any, search: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_transformers(plain, settings, search)


def test_omitted_settings_are_the_usual_ones(plain: Any) -> None:
    config = plain.config
    assert [load_speech(FOREIGN / name).precision for name in ("int8", "fp16")] == ["int8", "fp32"]
    with pytest.raises(ValueError, match="80 mel bins"):
        from_transformers(plain, {"num_mel_bins": None}, {})
    assert from_transformers(plain, {"activation_function": None}, {}).config.activation == "gelu"
    usual = from_transformers(plain, {}, {"alignment_heads": None, "suppress_tokens": None})
    layers, heads = range(config.decoder_layers // 2, config.decoder_layers), range(config.decoder_attention_heads)
    assert {*usual.config.alignment_heads} == {(layer, head) for layer in layers for head in heads}
    assert (usual.config.scale, usual.precision) == (1.0, "fp32")
    scaled = from_transformers(plain, {"scale_embedding": True, "suppress_tokens": [3, 4]}, {"suppress_tokens": None})
    assert (scaled.config.scale, scaled.config.suppress_ids) == (config.d_model**0.5, (3, 4))
    # The ids of languages come first, then those of six marks.
    ids = from_transformers(plain, {}, {"no_timestamps_token_id": None, "lang_to_id": {"<|en|>": EN}}).config
    assert (ids.no_timestamps, ids.no_speech, ids.languages) == (EN + 6, EN + 5, {EN: "<|en|>"})
    state = {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}
    assert from_state(config.to_dict(), plain.generation_config.to_dict(), state).precision == "bf16"


def test_damaged_folders_are_refused(plain: Any, folder: Path, tmp_path: Path) -> None:
    data = (folder / "model.bin").read_bytes()
    for changed in (data[:-50], data + b"x", data.replace(b"conv1", b"conv9"), data.replace(b"layer_1", b"layer_2")):
        (folder / "model.bin").write_bytes(changed)
        with pytest.raises(ValueError):
            SpeechModel(load_speech(folder))
    state = plain.state_dict()
    changes: dict[str, Any] = {
        "model.encoder.conv1.weight": lambda t: t[:, :-1],
        "model.encoder.conv2.weight": lambda t: t[..., :2],
        "model.encoder.embed_positions.weight": lambda t: t[:, :-1],
        "model.encoder.layers.0.self_attn.v_proj.weight": lambda t: t[:-1],
        "model.decoder.layers.1.encoder_attn.q_proj.bias": lambda t: t[:-1],
        "model.decoder.layers.1.fc2.weight": lambda t: t.T,
        "model.decoder.layer_norm.bias": lambda t: None,
        "model.decoder.embed_tokens.weight": lambda t: t[:, :-1],
    }
    for name, change in changes.items():
        wrong = copy.copy(state) | {name: change(state[name])}
        fake = copy.copy(plain)
        fake.state_dict = lambda wrong=wrong: {k: v for k, v in wrong.items() if v is not None and "proj_out" not in k}
        with pytest.raises(ValueError):
            SpeechModel(from_transformers(fake, {}, {}))


WITHOUT_TORCH = """
import sys
from pathlib import Path
import numpy as np
if is_hidden := "hidden" in sys.argv:
    from importlib.machinery import PathFinder

    find_spec = PathFinder.find_spec
    PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
import fastformer.audio, fastformer.cli, fastformer.commands.transcribe
from fastformer.audio.model import SpeechModel
from fastformer.checkpoints.speech import load_speech
model, prompt = SpeechModel(load_speech(Path(sys.argv[1]))), [61, 62, 66]
states = model.encode(np.sin(np.arange(384.0).reshape(1, 8, 48) ** 2))
model.align(states, prompt, [result.sequences_ids[0] for result in model.generate(states, [prompt])], 48)
assert "torch" not in sys.modules
if not is_hidden:  # the engine reads tensors although it came before PyTorch
    import fastformer.ops._extension as extension
    assert extension.host_function("tensor_layout") is not None
"""


def test_speech_needs_no_torch() -> None:
    """With AMX, a program imports PyTorch for the products of its oneDNN, if it is installed."""
    is_hidden = "amx_tile" in cpu_flags()
    words = [sys.executable, "-c", WITHOUT_TORCH, str(FOREIGN / "fp16"), *["hidden"] * is_hidden]
    subprocess.run(words, check=True, timeout=120)
