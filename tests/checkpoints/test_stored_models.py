"""Models whose matrices stay in a file of GGUF or CTranslate2: what reads them, and that they have its numbers."""

from __future__ import annotations

import copy
import pickle
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
from fastformer import Encoder
from fastformer.checkpoints.ctranslate2 import Rounded, as_tensors, load_transformer
from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.gguf.blocks import Kind
from fastformer.checkpoints.gguf.file import read_gguf
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.cli import main
from fastformer.generation import Chat
from fastformer.models import stored
from tests.checkpoints.test_ctranslate2 import written
from tests.checkpoints.test_gguf import LLAMA, contents, load, to_bytes
from tests.covering import by_turns
from tests.foreign.ctranslate2_folders import DECODER_FOLDERS, FOLDERS
from tests.foreign.gguf_files import FOLDER
from tests.foreign.gguf_files import IDS as ALL_IDS

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")


IDS = [min(i, 39) for i in ALL_IDS]  # the folders of CTranslate2 have 40 tokens


def is_waiting(model: nn.Module) -> bool:
    return stored.stand_in(model) is not model


@pytest.fixture
def unread(monkeypatch) -> None:
    """Makes reading all matrices an error."""

    def refuse(self: Any) -> None:
        raise AssertionError("the matrices were read")

    monkeypatch.setattr(stored._File, "read", refuse)


@pytest.fixture(scope="module")
def q4_0(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("q4_0") / "x.gguf"
    assert main(["quantize", str(LLAMA), str(path), "--precision", "q4_0"]) == 0
    return path


def in_memory(path: Any) -> nn.Module:
    model, _ = load(path)
    model.state_dict()
    assert not is_waiting(model)
    return model


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "smollm", "gemma3", "phi3", "gpt2", "mixtral", "qwen2moe", "q4_0", "ct2 llama", "ct2 qwen2"],
)
def test_the_engine_reads_the_file_and_finds_the_same(name, q4_0, monkeypatch) -> None:
    path = q4_0 if name == "q4_0" else FOLDER / f"{name}.gguf"
    path = DECODER_FOLDERS / name.removeprefix("ct2 ") if name.startswith("ct2") else path
    expected = fastformer.generate(in_memory(path), [IDS], max_new_tokens=12, do_sample=False, engine="cpp")
    model, _ = load(path)
    with monkeypatch.context() as patched:
        patched.setattr(stored._File, "read", None)
        found = fastformer.generate(model, [IDS], max_new_tokens=12, do_sample=False, engine="cpp")
    assert is_waiting(model) and torch.equal(found, expected)


class Allocated(TorchDispatchMode):
    """Counts the numbers in memory of new tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "zeros", "ones", "full")) and not result.is_meta:
            self.count += result.numel()
        return result


@pytest.mark.parametrize(
    "path", [LLAMA, FOLDER / "mixtral.gguf", DECODER_FOLDERS / "llama"], ids=lambda path: path.name
)
def test_no_memory_is_taken_for_matrices_that_stay_in_the_file(path) -> None:
    with Allocated() as allocated:
        model, _ = load(path)
    assert is_waiting(model)
    model.state_dict()
    assert allocated.count < sum(parameter.numel() for parameter in model.parameters()) / 2


@pytest.mark.parametrize("name", ["marian", "pegasus", "t5-gated"])  # int8, int16, int8
def test_translators_of_ctranslate2_are_read_by_the_engine(name, monkeypatch) -> None:
    read, numbers_of = list[str](), Rounded.numbers_of

    def noted(self: Rounded, *rest: Any) -> torch.Tensor:
        read.append(self.place)
        return numbers_of(self, *rest)

    monkeypatch.setattr(Rounded, "numbers_of", noted)
    model, _ = load_transformer(FOLDERS / name)
    assert not any("layer_" in place for place in read)  # embeddings are compared
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "engine": "cpp"}
    with monkeypatch.context() as patched:
        patched.setattr(stored._File, "read", None)
        found = fastformer.generate(model, [IDS], **options)
    assert is_waiting(model) and any("layer_" in place for place in read)
    plain, _ = load_transformer(FOLDERS / name)
    plain.state_dict()
    assert not is_waiting(plain) and torch.equal(found, fastformer.generate(plain, [IDS], **options))


def test_the_precision_of_a_rounded_translator_is_found_without_its_matrices(tmp_path, monkeypatch) -> None:
    """int8_bfloat16: biases and norms of bf16 need no comparison of the matrices with bf16."""
    folder = Path(shutil.copytree(FOLDERS / "t5-gated", tmp_path / "t5"))
    tensors = as_tensors(read_variables(folder / MODEL)[1])
    vectors = {name for name, each in tensors.items() if each.dtype == torch.float32 and not name.endswith("_scale")}
    counts, numbers_of = [0], Rounded.numbers_of

    def counted(self: Rounded, *rest: Any) -> torch.Tensor:
        counts[-1] += 1
        return numbers_of(self, *rest)

    monkeypatch.setattr(Rounded, "numbers_of", counted)
    for dtype in (torch.float32, torch.bfloat16):
        tensors |= {name: tensors[name].to(dtype) for name in vectors}
        (folder / MODEL).write_bytes(written(tensors))
        model, _ = load_transformer(folder)
        assert next(stored.stand_in(model).parameters()).dtype == torch.float32 and model.precision == "int8"
        counts.append(0)
    assert vectors and counts[0] == counts[1] > 0


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), 1e-40])
def test_scales_of_ctranslate2_that_are_no_numbers_are_refused(scale, tmp_path) -> None:
    folder = Path(shutil.copytree(DECODER_FOLDERS / "llama", tmp_path / "llama"))
    data, name = bytearray((folder / MODEL).read_bytes()), b"decoder/layer_1/ffn/linear_1/weight_scale\0"
    place = data.index(name) + len(name) + 1 + 4 + 1 + 4  # a rank, a size, a dtype, a number of bytes
    data[place : place + 4] = struct.pack("<f", scale)
    (folder / MODEL).write_bytes(data)
    with pytest.raises(ValueError, match="layer_1/ffn/linear_1"):
        fastformer.generate(load(folder)[0], [IDS], max_new_tokens=2, engine="cpp")


@pytest.mark.parametrize("name", ["qwen3", "smollm"])  # fp32, bf16
def test_a_matrix_that_embeds_and_makes_logits_is_packed_once(name, monkeypatch) -> None:
    path, counts, rows = FOLDER / f"{name}.gguf", Counter[str](), FileMatrix.rows

    def counted(self: FileMatrix, begin: int, end: int) -> torch.Tensor:
        counts[self._source.place] += end - begin
        return rows(self, begin, end)

    monkeypatch.setattr(FileMatrix, "rows", counted)
    fastformer.generate(load(path)[0], [IDS], max_new_tokens=2, do_sample=False, engine="cpp")
    (place,) = [place for place in counts if "token_embd" in place]
    assert counts[place] == read_gguf(path).tensors["token_embd.weight"].shape[0]


def test_commands_chats_and_encoders_read_no_matrix_into_memory(unread, tmp_path, capsys) -> None:
    assert main(["generate", str(LLAMA), "the dog", "--greedy", "--max_new_tokens", "4", "--device", "cpu"]) == 0
    assert "".join(Chat.from_pretrained(LLAMA, max_new_tokens=4).stream("two birds"))
    rows = Encoder.from_pretrained(FOLDER / "bert.gguf", device="cpu").encode(["the dog", "a book"])
    assert np.isfinite(rows).all()


ASKS = {
    "forward": lambda model: model(torch.tensor([IDS])),
    "a layer": lambda model: model.decoder.layers[0].linear1(torch.zeros(1, 32)),
    "attribute": lambda model: model.embedding.weight.sum(),
    "parameters": lambda model: sum(each.sum() for each in model.parameters()),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "double": lambda model: model.double(),
    "dict": lambda model: dict(model.decoder.layers[1].linear2._parameters),
    "quantize": lambda model: model.quantize("int8"),
    "assign": lambda model: setattr(model.embedding, "weight", nn.Parameter(torch.ones(len(model.output_weight), 32))),
    "functional_call": lambda model: torch.func.functional_call(model, {}, (torch.tensor([IDS]),)),
}


@pytest.mark.parametrize("how, kind", by_turns([*ASKS], ["q8_0", "q4_0"]))
def test_asking_for_a_parameter_reads_all(how, kind, q4_0) -> None:
    path = LLAMA if kind == "q8_0" else q4_0
    model, expected = load(path)[0], in_memory(path).state_dict()
    result = ASKS[how](model)
    assert not is_waiting(model) and all(type(module._parameters) is dict for module in model.modules())
    found = (result if how in ("deepcopy", "pickle") else model).state_dict()
    for name, tensor in expected.items():
        if how != "assign" or name != "embedding.weight":
            assert torch.equal(found[name].to(tensor.dtype), tensor), name
    assert how != "assign" or (model.embedding.weight == 1).all()


def test_a_model_that_inference_mode_reads_first_still_trains_and_decodes() -> None:
    model, _ = load(LLAMA)
    with torch.inference_mode():
        model(torch.tensor([IDS]))
    model(torch.tensor([IDS])).sum().backward()
    assert model.output.weight.grad is not None
    assert fastformer.generate(model, [IDS], max_new_tokens=2, engine="cpp").shape[0] == 1


def test_a_model_that_was_read_and_changed_is_packed_again() -> None:
    model, _ = load(LLAMA)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "engine": "cpp"}
    first = fastformer.generate(model, [IDS], **options)
    with torch.no_grad():
        model.output.weight[:] = 0
        model.output.weight[7] = 1
        model.output.weight[8] = -1
    second = fastformer.generate(model, [IDS], **options)
    assert {*second[0, len(IDS) :].tolist()} <= {7, 8} and not torch.equal(first, second)


@pytest.mark.parametrize("read", [lambda model: model.state_dict(), lambda model: fastformer.generate(model, [IDS])])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_numbers_that_are_not_finite_are_refused_when_they_are_read(read, kind, q4_0, tmp_path) -> None:
    values, tensors = contents(LLAMA if kind == "q8_0" else q4_0)
    number, sizes, data = tensors["blk.1.ffn_down.weight"]
    tensors["blk.1.ffn_down.weight"] = number, sizes, b"\xff\x7f" + data[2:]
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    with pytest.raises(ValueError, match="blk.1.ffn_down.weight"):
        read(load(tmp_path / "x.gguf")[0])


def test_operations_on_a_matrix_in_a_file_equal_those_in_memory() -> None:
    """Whether they read the numbers or not."""
    tensors = read_gguf(LLAMA).tensors
    matrix: Any = tensors["blk.0.ffn_up.weight"].matrix()
    experts = tensors["blk.0.ffn_up.weight"]._replace(shape=(4, 16, 32)).matrix()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    plain = matrix.read()
    cases: list[tuple[Any, bool]] = [
        (lambda x: x[5:9], True), (lambda x: x[-7:], True), (lambda x: x[60:999], True), (lambda x: x[9:5], True),
        (lambda x: x.split(24)[-1], True), (lambda x: x.split([10, 54])[1], True), (lambda x: x.chunk(3)[1], True),
        (lambda x: x.t(), True), (lambda x: x.T.t()[3:5], True), (lambda x: x.transpose(0, 1), True),
        (lambda x: x.detach(), True), (lambda x: x[:, 3:5], False), (lambda x: x[::2], False), (lambda x: x + 1, False),
        (lambda x: x.t()[2:4], False), (lambda x: torch.cat([x, x]), False), (lambda x: x.split(8, 1)[1], False),
        (lambda x: x.view(8, 8, 32), False), (lambda x: x.double(), False),
        (lambda x: x[order[3:9]], True), (lambda x: x[order[:4].view(2, 2)], False), (lambda x: x.float(), False),
    ]  # fmt: skip
    ordered = matrix[order]
    for both in ((matrix, plain), (ordered, plain[order])):
        assert torch.equal(both[0].rows(20, 50), both[1][20:50])
        for i, (operation, stays) in enumerate(cases):
            result, expected = map(operation, both)
            assert isinstance(result, FileMatrix) == stays, i
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype), i
            assert torch.equal(result + 0, expected), i
    for operation in (lambda x: x[2], lambda x: x[1:3], lambda x: x.flatten(0, 1), lambda x: x[-1], lambda x: x[1, 3]):
        assert torch.equal(operation(experts) + 0, operation(plain.view(4, 16, 32)))
    assert matrix.dtype == torch.float32 and tensors["blk.0.ffn_up.weight"].kind == Kind.Q8_0


class Counted:
    """The `Source` of whole numbers, which notes how many a call asks for."""

    dtype, place = torch.float32, "a test"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released: list[torch.Tensor] = []

    def numbers_of(self, shape: tuple[int, ...], stored: torch.Tensor) -> torch.Tensor:
        self.asked.append(stored.numel())
        return stored.float()

    def groups_of(self, shape: tuple[int, ...], *parts: Any) -> None:
        """Has no groups."""

    def release(self, *parts: Any) -> None:
        """Notes what needs no memory."""
        self.released.extend(parts)


def test_what_was_read_is_released_in_the_file() -> None:
    """Rows in order are parts of the file; rows in another order are copies, so that the file's are released."""
    numbers = torch.arange(8 * 32).view(8, 32)
    matrix: Any = FileMatrix(source := Counted(), (8, 32), (numbers,))
    for chosen, (begin, end) in ((matrix, (2, 5)), (matrix[torch.tensor([4, 1, 6])], (0, 3))):
        source.released.clear()
        chosen.rows(begin, end)
        [part] = source.released
        expected = numbers[2:5] if chosen is matrix else numbers
        assert part.data_ptr() == expected.data_ptr() and torch.equal(part, expected)


@pytest.mark.parametrize("shape", [(300, 512), (1, 40_000), (0, 16), (3, 20_000)])
def test_rows_are_read_in_pieces_that_no_threads_share(shape: tuple[int, int]) -> None:
    """Threads that share an operation wait for each other at its end, which takes long beside busy processes."""
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    matrix = FileMatrix(source := Counted(), shape, (numbers,))
    assert torch.equal(matrix.rows(0, shape[0]), numbers.float())
    assert all(count < 2**15 or count == shape[1] for count in source.asked)
    order = torch.arange(shape[0]).flip(0)
    turned: Any = matrix[order]
    assert torch.equal(turned.rows(0, shape[0]), numbers.flip(0).float())
    with torch.device("meta"):  # a default device holds for factories such as torch.empty
        elsewhere = matrix.rows(0, shape[0])
    assert torch.equal(elsewhere, numbers.float())
