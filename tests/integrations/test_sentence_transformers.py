"""Accelerated models of sentence-transformers return the numbers and types of plain ones, in every form of call."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import fastformer
from fastformer.integrations import accelerate, report, restore
from tests.checks import assert_accurate
from tests.encoding.folders import D_MODEL, MANY, MAX_LEN, SPECIAL, TEXTS, WORDS, bert, dense, modules, write

library = pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")
if int(library.__version__.partition(".")[0]) < 6:
    pytest.skip("the modules of its version 6 are used here", allow_module_level=True)

PAIRS = [("a bird sings", text) for text in MANY]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": MAX_LEN + 8, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns a function that writes the folder of a model of transformers once, with a tokenizer."""
    folders: dict[str, Path] = {}

    def save(name: str, padding_side: str = "right", **options: Any) -> str:
        key = f"{name} {padding_side} {options}"
        if key not in folders:
            folders[key] = folder = tmp_path_factory.mktemp("saved")
            bert(folder)
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), model_max_length=MAX_LEN, padding_side=padding_side,
                **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
            )  # fmt: skip
            tokenizer.save_pretrained(folder)
            kind = getattr(transformers, name)
            settings = SIZES | options
            if kind.config_class is transformers.DistilBertConfig:
                settings |= {"dim": D_MODEL, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
            torch.manual_seed(0)
            model = kind(kind.config_class(**settings))
            with torch.no_grad():
                for name_, parameter in model.named_parameters():
                    parameter.normal_(std=0.3)
                    if parameter.dim() == 1 and name_.endswith("weight"):
                        parameter += 1
            model.save_pretrained(folder)
        return str(folders[key])

    return save


@pytest.fixture(scope="module")
def made(saved: Save) -> Callable[[str], Any]:
    """Returns a function that makes a plain model of a kind once; it is to stay as it is."""
    return functools.cache(lambda name: KINDS[name].make(saved))


Save = Callable[..., str]
Call = Callable[[Any], Any]


def dense_of(save: Save, *behind: nn.Module, **options: Any) -> Any:
    """Returns a SentenceTransformer of a BERT and the modules behind it."""
    return library.SentenceTransformer(modules=[transformer(save), *behind], device="cpu", **options)


def transformer(save: Save, name: str = "BertModel", **options: Any) -> Any:
    return of_path(save(name), **options)


def of_path(folder: str, **options: Any) -> Any:
    from sentence_transformers.base.modules import Transformer

    if (key := f"{folder} {options}") not in _READ:
        _READ[key] = Transformer(folder, **options)
    return copy.deepcopy(_READ[key])  # a tenth of the time


_READ: dict[str, Any] = {}


def pooling(mode: Any = "mean", size: int = D_MODEL, **options: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(size, mode, **options)


def layer(kind: str, *args: Any, **options: Any) -> Any:
    """Returns a module of sentence-transformers behind a model, with random weights."""
    from sentence_transformers.base import modules as base
    from sentence_transformers.cross_encoder import modules as cross_modules
    from sentence_transformers.multi_vector_encoder import modules as multi
    from sentence_transformers.sentence_transformer import modules as dense_modules
    from sentence_transformers.sparse_encoder import modules as sparse

    torch.manual_seed(1)
    places = (base, dense_modules, sparse, multi, cross_modules)
    return next(getattr(place, kind) for place in places if hasattr(place, kind))(*args, **options)


def static(save: Save) -> Any:
    from tokenizers import Tokenizer

    return layer("StaticEmbedding", Tokenizer.from_file(save("BertModel") + "/tokenizer.json"), embedding_dim=D_MODEL)


def router(save: Save, query: list[nn.Module], document: list[nn.Module]) -> Any:
    from sentence_transformers.base.modules import Router

    return Router.for_query_document(query, document)


def splade(save: Save, name: str, mode: str = "max") -> list[nn.Module]:
    return [transformer(save, name, transformer_task="fill-mask"), layer("SpladePooling", mode)]


def of_tokens(size: int = 16) -> Any:
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    return layer("Dense", D_MODEL, size, bias=False, **names)


def multi_vector(save: Save, *behind: nn.Module, **options: Any) -> Any:
    return library.MultiVectorEncoder(modules=[transformer(save, **options), of_tokens(), *behind], device="cpu")


def of_words(*behind: nn.Module) -> Any:
    """Returns a SentenceTransformer of a table of words, without a Transformer."""
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    weights = np.random.default_rng(0).normal(size=(len(WORDS), D_MODEL)).astype(np.float32)
    words = layer("WordEmbeddings", WhitespaceTokenizer(WORDS, stop_words=()), weights)
    return library.SentenceTransformer(modules=[words, *behind], device="cpu")


def clip(save: Save) -> Any:
    """Returns a SentenceTransformer of the older module CLIPModel, which embeds texts and images."""
    from sentence_transformers.sentence_transformer.modules import CLIPModel

    pytest.importorskip("PIL", reason="not installed: pip install pillow")
    sizes = SIZES | {"max_position_embeddings": MAX_LEN}
    folder = save("CLIPModel", text_config=sizes, vision_config=SIZES | {"image_size": 8, "patch_size": 4})
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return library.SentenceTransformer(modules=[CLIPModel(folder)], device="cpu")


def encode_images(model: Any) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(256, size=(3, 10, 12, 3), dtype=np.uint8)
    return model.encode([Image.fromarray(each) for each in pixels])


def encode(**options: Any) -> Call:
    return lambda model: model.encode(MANY, **options)


ENCODE, TOKENS = encode(), encode(output_value="token_embeddings")
TASKS: tuple[Call, ...] = (lambda model: model.encode_query(MANY), lambda model: model.encode_document(MANY))
SCORES: tuple[Call, ...] = (
    lambda model: model.predict(PAIRS),
    lambda model: [entry["score"] for entry in model.rank("a bird sings", MANY)],
)


class Kind(NamedTuple):
    """A kind of model: how it is made, what is called, and whether the engine computes padded batches."""

    make: Callable[[Save], Any]
    calls: tuple[Call, ...] = (ENCODE, lambda model: model.encode(TEXTS[3]))
    engine: bool = True


def pooled(mode: str) -> Kind:
    return Kind(lambda save: dense_of(save, pooling(mode)), (ENCODE, TOKENS))


def of_folder(name: str, **options: Any) -> Kind:
    return Kind(lambda save: library.SentenceTransformer(save(name, **options), device="cpu"))


def sparse(name: str, mode: str) -> Kind:
    calls = (ENCODE, encode(convert_to_sparse_tensor=False, max_active_dims=5), *TASKS)
    return Kind(lambda save: library.SparseEncoder(modules=splade(save, name, mode), device="cpu"), calls)


def cross(name: str, **options: Any) -> Kind:
    calls = SCORES if options["num_labels"] == 1 else (lambda model: model.predict(PAIRS, apply_softmax=True),)
    return Kind(lambda save: library.CrossEncoder(save(name, **options), device="cpu"), calls)


DECODER: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}


def of_decoder(name: str, side: str = "left", mode: str = "lasttoken", **options: Any) -> Kind:
    def make(save: Save) -> Any:
        folder = save(f"{name}Model", side, **DECODER | options)
        return library.SentenceTransformer(modules=[of_path(folder), pooling(mode)], device="cpu")

    return Kind(make)


def generating(save: Save) -> Any:
    """Returns a CrossEncoder that compares the logits of two tokens, as Qwen3-Reranker does."""
    folder = save("Qwen3ForCausalLM", "left", **DECODER)
    return library.CrossEncoder(
        modules=[of_path(folder, transformer_task="text-generation"), layer("LogitScore", 7, 8)], device="cpu"
    )


KINDS = {
    **{
        f"{name} pooling": pooled(name)
        for name in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    },
    "several poolings": Kind(lambda save: dense_of(save, pooling(["mean", "max"]))),
    "prompts": Kind(
        lambda save: dense_of(save, pooling(include_prompt=False), prompts={"query": "query : ", "p": "the "}),
        (encode(prompt_name="p"), encode(prompt="a "), *TASKS),
    ),
    "Dense, LayerNorm, Dropout, Normalize": Kind(
        lambda save: dense_of(
            save, pooling(), layer("Dense", D_MODEL, 16), layer("LayerNorm", 16), layer("Dropout"), layer("Normalize")
        ),
        (ENCODE, encode(truncate_dim=8, normalize_embeddings=True), encode(convert_to_tensor=True, batch_size=5)),
    ),
    "Dense on tokens": Kind(lambda save: dense_of(save, of_tokens(), pooling(size=16)), (ENCODE, TOKENS)),
    "left padding": Kind(
        lambda save: library.SentenceTransformer(
            modules=[transformer(lambda name: save(name, "left")), pooling("lasttoken")], device="cpu"
        )
    ),
    "RoBERTa": of_folder("RobertaModel"),
    "XLM-RoBERTa": of_folder("XLMRobertaModel"),
    "CamemBERT": of_folder("CamembertModel"),
    "DistilBERT": of_folder("DistilBertModel"),
    "MPNet": of_folder("MPNetModel", pad_token_id=1),
    "ELECTRA": of_folder("ElectraModel", embedding_size=16),
    "ALBERT": of_folder("AlbertModel", embedding_size=16),
    "ModernBERT": of_folder("ModernBertModel", local_attention=8),
    "EuroBERT": of_folder("EuroBertModel", num_key_value_heads=2),
    "T5": of_folder("T5EncoderModel", d_model=D_MODEL, d_kv=8, d_ff=48),
    "Router of two models": Kind(
        lambda save: library.SentenceTransformer(
            modules=[
                router(save, *([transformer(save), pooling(mode)] for mode in ("cls", "mean"))),
                layer("Normalize"),
            ],
            device="cpu",
        ),
        TASKS,
    ),
    "Router of StaticEmbedding": Kind(
        lambda save: library.SentenceTransformer(
            modules=[router(save, [static(save)], [transformer(save), pooling()])], device="cpu"
        ),
        TASKS,
    ),
    "StaticEmbedding": Kind(
        lambda save: library.SentenceTransformer(modules=[static(save)], device="cpu"), (ENCODE,), engine=False
    ),
    "WeightedLayerPooling": Kind(
        lambda save: library.SentenceTransformer(
            modules=[
                transformer(save, config_kwargs={"output_hidden_states": True}),
                layer("WeightedLayerPooling", D_MODEL, num_hidden_layers=2, layer_start=1),
                pooling(),
            ],
            device="cpu",
        ),
        engine=False,
    ),
    "CNN": Kind(lambda save: dense_of(save, layer("CNN", D_MODEL, 8, [1, 3]), pooling(size=16)), engine=False),
    "CLIPModel, texts and images": Kind(clip, (ENCODE, encode_images), engine=False),
    "WordEmbeddings and WordWeights": Kind(
        lambda save: of_words(layer("WordWeights", WORDS, {"bird": 3.0}), pooling()), (ENCODE,), engine=False
    ),
    "LSTM": Kind(lambda save: of_words(layer("LSTM", D_MODEL, 16), pooling()), (ENCODE,), engine=False),
    "BoW": Kind(
        lambda save: library.SentenceTransformer(modules=[layer("BoW", WORDS)], device="cpu"), (ENCODE,), engine=False
    ),
    "SPLADE of BERT": sparse("BertForMaskedLM", "max"),
    "SPLADE of DistilBERT": sparse("DistilBertForMaskedLM", "sum"),
    "SparseStaticEmbedding": Kind(
        lambda save: library.SparseEncoder(
            modules=[
                router(
                    save,
                    [layer("SparseStaticEmbedding", transformer(save).tokenizer)],
                    splade(save, "BertForMaskedLM"),
                )
            ],
            device="cpu",
        ),
        TASKS,
    ),
    "SparseAutoEncoder": Kind(
        lambda save: library.SparseEncoder(
            modules=[transformer(save), pooling(), layer("SparseAutoEncoder", D_MODEL, 64, 8)], device="cpu"
        )
    ),
    "ColBERT": Kind(lambda save: multi_vector(save, layer("MultiVectorMask", [","])), TASKS),
    "ColBERT with HierarchicalTokenPooling": Kind(
        lambda save: multi_vector(save, layer("MultiVectorMask"), layer("HierarchicalTokenPooling", pool_factor=2)),
        TASKS,
    ),
    "ColBERT with LambdaTokenPooling": Kind(
        lambda save: multi_vector(save, layer("MultiVectorMask"), layer("LambdaTokenPooling", lambda rows: rows[::2])),
        TASKS,
        engine=False,
    ),
    "ColBERT with masked expansions": Kind(
        lambda save: multi_vector(
            save,
            layer("MultiVectorMask"),
            query_expansion={"strategy": "fixed", "length": MAX_LEN, "attend": False},
        ),
        TASKS,
        engine=False,
    ),
    "ColBERT with expansions": Kind(
        lambda save: multi_vector(
            save, layer("MultiVectorMask"), query_expansion={"strategy": "fixed", "length": MAX_LEN, "attend": True}
        ),
        TASKS,
    ),
    "Qwen3": of_decoder("Qwen3"),
    "Qwen3 padded on the right": of_decoder("Qwen3", "right", "weightedmean"),
    "Mistral": of_decoder("Mistral", sliding_window=4),
    "Llama": of_decoder("Llama"),
    "Gemma 3": of_decoder("Gemma3Text", mode="mean", sliding_window=4, query_pre_attn_scalar=8),
    "EmbeddingGemma": Kind(
        lambda save: library.SentenceTransformer(
            modules=[
                of_path(
                    save(
                        "Gemma3TextModel",
                        "right",
                        **DECODER,
                        sliding_window=5,
                        use_bidirectional_attention=True,
                        layer_types=["sliding_attention", "full_attention"],
                    )
                ),
                pooling(),
                layer("Dense", D_MODEL, 64, bias=False, activation_function=nn.Identity()),
                layer("Dense", 64, D_MODEL, bias=False, activation_function=nn.Identity()),
                layer("Normalize"),
            ],
            device="cpu",
        )
    ),
    "Llama both ways": of_decoder("Llama", mode="mean", is_causal=False),
    "CrossEncoder of Qwen3": cross("Qwen3ForSequenceClassification", num_labels=1, **DECODER),
    "CrossEncoder of Llama": cross("LlamaForSequenceClassification", num_labels=2, **DECODER),
    "CrossEncoder of Qwen3's logits": Kind(generating, SCORES),
    "CrossEncoder of BERT": cross("BertForSequenceClassification", num_labels=1),
    "CrossEncoder of XLM-RoBERTa": cross("XLMRobertaForSequenceClassification", num_labels=1),
    "CrossEncoder of DistilBERT": cross("DistilBertForSequenceClassification", num_labels=3),
    "CrossEncoder of ELECTRA": cross("ElectraForSequenceClassification", num_labels=1),
    "CrossEncoder of ModernBERT": cross("ModernBertForSequenceClassification", num_labels=1, local_attention=8),
    "CrossEncoder of EuroBERT": cross("EuroBertForSequenceClassification", num_labels=1, num_key_value_heads=1),
}


def rows_of(result: Any) -> Tensor:
    """Returns the numbers of a call's result as one tensor."""
    if isinstance(result, list):
        parts = [rows_of(each).double().flatten() for each in result]
        return torch.cat(parts)
    row = torch.as_tensor(result)
    return row.to_dense() if row.is_sparse else row


def forms(result: Any) -> Any:
    """Returns the types of a result and of what it holds, with dtypes and shapes."""
    if isinstance(result, list):
        return [forms(each) for each in result]
    return type(result), getattr(result, "dtype", None), getattr(result, "shape", None)


def agree(ours: Any, plain: Any, calls: tuple[Call, ...]) -> None:
    exact = copy.deepcopy(plain).double()
    for call in calls:
        found, expected = call(ours), call(plain)
        assert forms(found) == forms(expected)
        assert_accurate(rows_of(found).float(), rows_of(expected).float(), rows_of(call(exact)))


@pytest.mark.parametrize("name", KINDS)
def test_numbers_and_types_stay(
    name: str, made: Callable[[str], Any], calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kind, plain = KINDS[name], made(name)
    ours = accelerate(copy.deepcopy(plain))
    assert isinstance(ours, type(plain)) and type(ours).__name__ == type(plain).__name__
    with caplog.at_level("DEBUG", logger="fastformer"):
        agree(ours, plain, kind.calls)
    fell_back = [record.message for record in caplog.records if "runs by its modules" in record.message]
    assert (calls[0] > 0 and not fell_back) == kind.engine, fell_back


def test_each_module_of_the_library_is_in_a_kind(made: Callable[[str], Any]) -> None:
    from sentence_transformers.base import modules as base
    from sentence_transformers.cross_encoder import modules as cross_modules
    from sentence_transformers.multi_vector_encoder import modules as multi
    from sentence_transformers.sentence_transformer import modules as dense_modules
    from sentence_transformers.sparse_encoder import modules as sparse_modules

    places = (base, cross_modules, multi, dense_modules, sparse_modules)
    abstract = {"Module", "InputModule", "BaseTokenPooling"}
    older = {"Asym", "MLMTransformer"}  # names of Router and Transformer, for older folders
    found = {type(module).__name__ for name in KINDS for module in made(name).modules()}
    assert {name for place in places for name in place.__all__} - abstract - older - found == set()


def test_low_precision_runs_and_is_near(saved: Save, calls: list[int]) -> None:
    plain = dense_of(saved, pooling(), layer("Normalize"))
    expected = plain.encode(MANY)
    for precision, least in (("bf16", 0.999), ("int8", 0.99)):
        ours = accelerate(copy.deepcopy(plain), precision=precision)
        before, found = calls[0], ours.encode(MANY)
        assert calls[0] > before and found.dtype == np.float32
        assert least < (found * expected).sum(1).min() < 1.0, precision
        for stored in ("int8", "ubinary"):
            assert ours.encode(MANY, precision=stored).dtype == plain.encode(MANY, precision=stored).dtype


def test_modes_are_set_where_they_are_others_alone(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """sentence-transformers asks for evaluation in each call."""
    visited, plainly = [], nn.Module.train

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        visited.append(self)
        return plainly(self, mode)

    monkeypatch.setattr(nn.Module, "train", train)
    ours = accelerate(dense_of(saved, pooling()))
    expected = ours.encode(MANY)
    visited.clear()
    np.testing.assert_array_equal(ours.encode(MANY), expected)
    assert 0 < len(visited) < 5 < len([*ours.modules()])
    inner = [*ours.modules()]
    for kind in (transformers.BertModel, nn.Linear, nn.Dropout, library.SentenceTransformer):
        module = next(each for each in inner if isinstance(each, kind))
        for report_first in (False, True):
            module.training = True
            if report_first:
                report(ours)  # which finds the model as it is
            ours.eval()
            assert not any(each.training for each in inner)
            module.train()
            ours.encode(MANY)
            assert not any(each.training for each in inner)
    assert all(each.training for each in ours.train().modules())


@pytest.mark.slow  # another process, which imports everything again
def test_the_saved_model_loads_without_fastformer(saved: Save, tmp_path: Path) -> None:
    """Tests that the folder names no class of this library, and that `restore` gives the classes back."""
    ours = accelerate(
        library.SentenceTransformer(
            modules=[router(saved, *([transformer(saved), pooling()] for _ in range(2))), layer("Normalize")],
            device="cpu",
        )
    )
    ours.save_pretrained(str(tmp_path / "model"))
    program = (
        "import sys; sys.modules['fastformer'] = None; sys.path[:0] = eval(sys.argv[3])\n"
        "import numpy, sentence_transformers\n"
        "model = sentence_transformers.SentenceTransformer(sys.argv[1], device='cpu')\n"
        "numpy.save(sys.argv[2], model.encode_query(['a bird sings', 'the hills']))"
    )
    arguments = [str(tmp_path / "model"), str(tmp_path / "rows.npy"), repr(sys.path)]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)
    found = ours.encode_query(["a bird sings", "the hills"])
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), found, atol=1e-5)
    restore(ours)
    assert not any(type(module).__module__.startswith("fastformer") for module in ours.modules())


class Mean(nn.Module):
    """A module of a user that reads all positions."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = features["token_embeddings"].mean(1)
        return features

    def save(self, *args: Any, **options: Any) -> None:
        """Does nothing."""


class MyPooling(type(pooling())):  # type: ignore[misc]
    """A pooling of a user under sentence-transformers' name, which reads all positions."""

    forward = Mean.forward


MyPooling.__name__ = "Pooling"


def hooked() -> Any:
    module = pooling()
    module.register_forward_pre_hook(lambda module, args: (Mean()(dict(args[0])) and args,)[0])
    module.register_forward_hook(lambda module, args, result: Mean()(result))
    return module


def patched() -> Any:
    module = pooling()
    module.forward = Mean().forward
    return module


@pytest.mark.parametrize(
    "make", [Mean, lambda: MyPooling(D_MODEL), hooked, patched], ids=["own", "named", "hook", "patch"]
)
def test_a_module_that_may_read_padding_gets_it(make: Callable[[], nn.Module], saved: Save) -> None:
    plain = library.SentenceTransformer(modules=[transformer(saved), make()], device="cpu")
    ours = accelerate(copy.deepcopy(plain) if make is not patched else plain)
    assert "is computed" in str(report(ours).padding)
    reference = library.SentenceTransformer(modules=[transformer(saved), Mean()], device="cpu")
    agree(ours, reference, (ENCODE,))


@pytest.mark.slow  # two more processes
def test_a_pool_of_processes(saved: Save, tmp_path: Path) -> None:
    program = tmp_path / "pooled.py"
    program.write_text(
        "import sys, numpy, sentence_transformers, fastformer\n"
        "if __name__ == '__main__':\n"
        "    model = fastformer.accelerate(sentence_transformers.SentenceTransformer(sys.argv[1], device='cpu'))\n"
        "    texts = ['a bird sings', 'the hills', 'two birds'] * 7\n"
        "    pool = model.start_multi_process_pool(['cpu'] * 2)\n"
        "    rows = model.encode(texts, pool=pool, chunk_size=5)\n"
        "    model.stop_multi_process_pool(pool)\n"
        "    numpy.testing.assert_allclose(rows, model.encode(texts), atol=1e-5)\n"
    )
    paths = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, str(program), saved("BertModel")], check=True, timeout=300, env=paths)


def test_folders_that_our_encoder_reads_too(tmp_path: Path) -> None:
    """Compares sentence-transformers, accelerated, and `Encoder` on one folder."""
    bert(tmp_path)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    write(tmp_path / "tokenizer_config.json", {**names, "model_max_length": MAX_LEN})
    places = modules(tmp_path, ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": "mean"}), ("Dense", {}))
    dense(places[1], D_MODEL, 8)
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    plain = library.SentenceTransformer(str(tmp_path), device="cpu")
    calls = (ENCODE, encode(truncate_dim=4, normalize_embeddings=True), lambda model: model.encode_query(MANY))
    agree(accelerate(copy.deepcopy(plain)), plain, calls)
    agree(fastformer.Encoder(tmp_path), plain, calls)


@pytest.mark.parametrize("lowers", [False, True])
def test_special_tokens_of_a_prompt_are_tokens(lowers: bool, saved: Save, tmp_path: Path) -> None:
    prompts = {"query": "[MASK] The ", "document": "[CLS]b : "}
    parts = [transformer(saved, do_lower_case=lowers), pooling(include_prompt=False)]
    plain = library.SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    plain.save_pretrained(str(tmp_path))
    ours = fastformer.Encoder(tmp_path)
    agree(ours, plain, TASKS)
    # What a text spells is no token, with a prompt or without one.
    spelled, before = "a [MASK] bird", ours.tokenize(["a bird"])["input_ids"].shape[1]
    mask = SPECIAL.index("[MASK]")
    for prompt, count in (("", 0), (prompts["query"], 1)):
        ids = ours._reader.texts([spelled], prompt).ids[0]
        assert ids.count(mask) == count and len(ids) > before
