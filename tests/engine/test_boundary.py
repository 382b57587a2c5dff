"""Any Python value that is passed to the engine gives a result or an error, and never ends the process."""

from __future__ import annotations

import functools
import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.generation.engines.cpp import pack_options, pack_tensors
from fastformer.models import GPT, Transformer
from fastformer.ops import _extension
from tests.covering import each
from tests.engine.test_thread_team import in_child
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn

pytestmark = needs_cpp

EXT: Any = _extension.module()
VOCAB, BLOCKS = 11, 6
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 12, "num_heads": 2, "d_ff": 8, "max_len": 20}
ERRORS = (ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError, RuntimeError)

FEW = settings(max_examples=100, deadline=None, derandomize=True, database=None)
MANY = settings(max_examples=5000, deadline=None, database=None)


def model_of(which: str) -> Any:
    if which == "gpt":
        return drawn(GPT, **SIZES, num_layers=1, positions="rotary", activation="swiglu")
    return drawn(
        Transformer, **SIZES, num_encoder_layers=1, num_decoder_layers=1, source_vocab_size=7, tie_embeddings=False,
        positions="learned", embedding_norm=True,
    )  # fmt: skip


# Options that a dictionary need not have: see ModelOptions in csrc/engine/packed_model.h.
OPTIONAL = (
    "num_encoder_layers", "num_decoder_layers", "rms_norm", "parallel_residual", "skips_first_norm", "is_bare", "scale",
    "attention_softcap", "logit_softcap", "padding_idx", "encoder_windows", "decoder_windows",
    "causal_encoder", "experts_per_token", "norm_topk_prob", "norm_topk_eps", "expert_scale", "sigmoid_router",
    "shared_gate", "mamba_groups", "rotary_layers", "linear_key_heads",
)  # fmt: skip
MODELS = {which: model_of(which) for which in ("gpt", "transformer")} if EXT is not None else {}


def parts(which: str, precision: str = "fp32") -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(pack_options(MODELS[which], precision)), dict(pack_tensors(MODELS[which], precision))


def new_session(which: str, precision: str = "fp32", blocks: int = BLOCKS) -> Any:
    return EXT.Session(EXT.PackedModel(*parts(which, precision)), blocks * 16)


def with_gaps(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros([2 * size for size in shape], dtype)[tuple(slice(None, None, 2) for _ in shape)]


ints = st.one_of(st.integers(-3, 14), st.sampled_from([2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63), 2**64]))
odd = st.one_of(ints, st.none(), st.booleans(), st.floats(), st.sampled_from(["", "fp32", "relu", "tanh", b"x", ()]))
arrays = st.one_of(
    st.none(),
    st.sampled_from([3, "text", [1.0, 2.0], np.float32(1), np.array(1.0, np.float32), np.zeros((0, 0), np.float32)]),
    st.builds(
        lambda shape, dtype, has_gaps: (with_gaps if has_gaps else np.zeros)(shape, dtype),
        st.lists(st.integers(0, 13), max_size=3),
        st.sampled_from([np.float32, np.uint16, np.uint8, np.float64, np.int64, np.float16, bool]),
        st.booleans(),
    ),
)  # fmt: skip


def packs_or_says_why_not(
    which: str, precision: str, wrong: dict[str, Any], other: dict[int, Any], left_out: int
) -> None:
    options, tensors = parts(which, precision)
    names = sorted(tensors)
    options |= wrong
    tensors |= {names[place % len(names)]: value for place, value in other.items()}
    if left_out >= 0:
        tensors.pop(names[left_out % len(names)])
    try:
        session = EXT.Session(EXT.PackedModel(options, tensors), 32)
        session.admit([[1, 2]], [[3, 4, 5]], 1)
        session.step([6], 2, True, [], None, 1)
    except ERRORS:
        return


shapes = given(
    st.sampled_from(["gpt", "transformer"]),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.dictionaries(st.sampled_from(sorted({*parts("gpt")[0], *OPTIONAL})) if MODELS else st.text(), odd, max_size=2),
    st.dictionaries(st.integers(0, 60), arrays, max_size=2),
    st.integers(-20, 60),
)
test_a_model_is_packed_or_it_is_said_why_not = FEW(shapes(packs_or_says_why_not))
test_many_models_are_packed_or_it_is_said_why_not = pytest.mark.slow(MANY(shapes(packs_or_says_why_not)))


SIZES_OF = ("d_model", "num_heads", "num_kv_heads", "num_decoder_layers")
WRONG_SIZES: list[tuple[str, Any]] = [(name, value) for name in SIZES_OF for value in (0, -1, 2**62)]
WRONG_SIZES += [("num_heads", 5), ("num_kv_heads", 3), ("num_encoder_layers", 2), ("precision", "fp64")]
# Cross-attention has no norm of its output.
WRONG_SIZES += [("norm_placement", "post"), ("norm_placement", "both")]


@each("name, value", WRONG_SIZES)
def test_options_that_do_not_make_a_model_are_refused(name, value) -> None:
    options, tensors = parts("transformer")
    with pytest.raises(ValueError):
        EXT.PackedModel({**options, name: value}, tensors)


def test_options_that_may_be_missing_and_names_that_no_model_has() -> None:
    options, tensors = parts("gpt")
    for name in options.keys() - OPTIONAL:
        with pytest.raises(KeyError, match=name):
            EXT.PackedModel({other: value for other, value in options.items() if other != name}, tensors)
    with pytest.raises(TypeError, match="window_size"):
        EXT.PackedModel({**options, "window_size": 3}, tensors)
    defaults = {"num_encoder_layers": -1, "is_bare": False, "skips_first_norm": False, "encoder_windows": []}
    for model_options in (options, {**options, **defaults}):
        session = EXT.Session(EXT.PackedModel(model_options, tensors), 32)
        session.admit([[]], [[3, 4, 5]], 1)


@pytest.mark.parametrize("which", ["gpt", "transformer"])
def test_each_tensor_has_to_be_of_its_shape_and_a_known_dtype(which) -> None:
    options, tensors = parts(which)
    for name, array in tensors.items():
        longer = np.zeros([array.shape[0] + 1, *array.shape[1:]], np.float32)
        wider = np.zeros([*array.shape[:-1], array.shape[-1] + 1], np.float32)
        for wrong in (longer, wider, array[None], array.ravel()[:1].reshape(())):
            # A table may have any number of rows, as long as it has enough of them.
            if wrong is longer and name.endswith(("source_embedding", "target_embedding", "_positions")):
                continue
            with pytest.raises(ValueError, match=r"\bshape\b|\brotary\b|\bembedding\b"):
                EXT.PackedModel(options, {**tensors, name: wrong})
        with pytest.raises(ValueError, match=r"\bfloat32\b.*\buint16\b"):
            EXT.PackedModel(options, {**tensors, name: array.astype(np.float64)})
        with pytest.raises(ValueError, match=r"\bcontiguous\b"):
            EXT.PackedModel(options, {**tensors, name: with_gaps(array.shape)})
    with pytest.raises(ValueError, match=r"\bembedding\b"):
        EXT.PackedModel(options, {**tensors, "target_embedding": np.zeros((VOCAB - 1, 12), np.float32)})


@pytest.mark.parametrize("which", ["gpt", "transformer"])
def test_bytes_are_weights_of_int4_alone(which) -> None:
    options, tensors = parts(which)
    for name, array in tensors.items():
        for columns in {array.shape[-1], 16}:
            with pytest.raises(ValueError, match=r"\b(dtype|shape|has no tensor)\b"):
                EXT.PackedModel(options, {**tensors, name: np.zeros([*array.shape[:-1], columns], np.uint8)})
    nibbles = parts(which, "int4")[1]
    nibbles |= {
        name.removesuffix(".scale") + ".zero": np.full(scale.shape, 8, np.uint8)
        for name, scale in nibbles.items() if name.endswith(".scale")
    }  # fmt: skip
    EXT.PackedModel({**options, "precision": "int4"}, nibbles)
    for precision in ("fp32", "bf16", "int8"):
        with pytest.raises(ValueError, match=r"\bdtype\b"):
            EXT.PackedModel({**options, "precision": precision}, nibbles)


def test_a_decoders_embeddings_have_the_models_width() -> None:
    options, tensors = parts("gpt")
    tensors |= {"target_projection.weight": np.zeros((12, 40), np.float32)}  # decoders have none
    with pytest.raises(ValueError, match=r"\btarget_embedding\b"):
        EXT.PackedModel(options, {**tensors, "target_embedding": np.zeros((VOCAB, 40), np.float32)})


lists = st.lists(st.integers(-3, 14), max_size=4)
# Nothing in between: two sessions are to take the same steps.
seconds = st.sampled_from([-1.0, 0.0, 60.0, math.inf, math.nan])
calls = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.lists(lists, max_size=3), st.lists(st.lists(ints, max_size=22), max_size=3)),
        st.tuples(st.just("step"), st.lists(ints, max_size=6), st.one_of(st.integers(1, 11), ints), st.booleans()),
        st.tuples(st.just("reorder"), st.lists(lists, max_size=3)),
        st.tuples(st.just("release"), lists),
        st.tuples(st.just("run"), lists, ints, seconds, ints, st.booleans()),
        st.tuples(st.just("set_shortlist"), st.lists(ints, max_size=5)),
        st.tuples(st.just("good")),
    ),
    max_size=14,
)


def good_step(session: Any, rows: int) -> Any:
    return session.step([3] * rows, VOCAB, True, [], None, 1)


def stays_as_it_was_after_an_error(which: str, what: list[tuple[Any, ...]], threads: int) -> None:
    tried, other = new_session(which), new_session(which)
    groups: list[int] = []  # the rows of each, as far as the calls were good
    for name, *given_ in what:
        if name == "run":
            searches = [EXT.greedy_search(3, [1], 0, []) if i != 7 else None for i in given_[0]]
            arguments = [searches, [3] * len(searches), *given_[1:], threads]
        elif name == "step":
            arguments = [*given_, [], None, threads]
        elif name == "good":
            name, arguments = "step", [[3] * sum(groups), 3, True, [], None, threads]
        else:
            arguments = [*given_, *([threads] if name == "admit" else [])]
        before = tried.free_tokens()
        try:
            getattr(tried, name)(*arguments)
        except ERRORS:
            assert tried.free_tokens() >= before
            continue
        if name == "run":
            arguments[0] = [EXT.greedy_search(3, [1], 0, []) for _ in searches]
        getattr(other, name)(*arguments)
        if name == "admit":
            groups += [1] * len(arguments[1])
        elif name == "reorder":
            groups = list(map(len, arguments[0]))
        elif name == "release":
            groups = [rows for i, rows in enumerate(groups) if i not in arguments[0]]
    if groups:
        try:
            step = good_step(tried, sum(groups))
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                good_step(other, sum(groups))
        else:
            assert all(np.array_equal(a, b) for a, b in zip(step, good_step(other, sum(groups)), strict=True))
    for session in (tried, other):
        session.release(range(len(groups)))
        assert session.free_tokens() == BLOCKS * 16


sequences = given(st.sampled_from(["gpt", "transformer"]), calls, st.sampled_from([0, 1, 2, 3]))
test_a_session_is_as_it_was_after_an_error = FEW(sequences(stays_as_it_was_after_an_error))
test_sessions_are_as_they_were_after_many_errors = pytest.mark.slow(MANY(sequences(stays_as_it_was_after_an_error)))


def wrong_calls(session: Any) -> dict[str, tuple[Callable[[], object], str]]:
    room = np.empty((1, VOCAB), np.float32)
    search = EXT.greedy_search(3, [1], 0, [])
    two = [search, EXT.greedy_search(3, [1], 0, [])]
    return {
        "id of vocab_size": (lambda: session.step([VOCAB, 3], 1, True, [], None, 1), "tokens"),
        "negative id": (lambda: session.step([3, -1], 1, True, [], None, 1), "tokens"),
        "a token too few": (lambda: session.step([3], 1, True, [], None, 1), "token"),
        "no k": (lambda: session.step([3, 3], 0, True, [], None, 1), "k"),
        "k above the vocabulary": (lambda: session.step([3, 3], VOCAB + 1, True, [], None, 1), "k"),
        "no room for logits": (lambda: session.step([3, 3], 1, True, [0], None, 1), "logits"),
        "too little room": (lambda: session.step([3, 3], 1, True, [0, 1], room, 1), "logits"),
        "logits of another row": (lambda: session.step([3, 3], 1, True, [2], room, 1), "rows"),
        "prompt id": (lambda: session.admit([[]], [[3, VOCAB]], 1), "ids"),
        "prompt above max_len": (lambda: session.admit([[]], [[3] * 21], 1), "max_len"),
        "a prompt for which there is no memory": (lambda: session.admit([[]] * 5, [[3] * 18] * 5, 1), "room"),
        "parents of one group": (lambda: session.reorder([[0]]), "parents"),
        "no parents": (lambda: session.reorder([[0], []]), "parents"),
        "a parent too high": (lambda: session.reorder([[0], [1]]), "parents"),
        "a parent below": (lambda: session.reorder([[-1], [0]]), "parents"),
        "a group twice": (lambda: session.release([0, 0]), "groups"),
        "a group too high": (lambda: session.release([0, 2]), "groups"),
        "a group below": (lambda: session.release([1, -1]), "groups"),
        "a search too few": (lambda: session.run([search], [3, 3], 1, 1.0, 0, True, 1), "search"),
        "None for a search": (lambda: session.run([None, search], [3, 3], 1, 1.0, 0, True, 1), "search"),
        "a search twice": (lambda: session.run([search] * 2, [3, 3], 1, 1.0, 0, True, 1), "search"),
        "a token too few for searches": (lambda: session.run(two, [3], 1, 1.0, 0, True, 1), "token"),
        "no thread to admit": (lambda: session.admit([], [[3]], 0), "thread"),
        "no thread to step": (lambda: session.step([3, 3], 1, True, [], None, -1), "thread"),
        "no thread to search": (lambda: session.run(two, [3, 3], 1, 1.0, 0, True, 0), "thread"),
        "a shortlist while there are rows": (lambda: session.set_shortlist([3, 4]), "rows"),
    }


@each("name", wrong_calls(None) if EXT is not None else [])
def test_a_wrong_call_is_named_and_changes_nothing(name) -> None:
    session, other = new_session("gpt"), new_session("gpt")
    for s in (session, other):
        s.admit([], [[3, 4], [5]], 1)
        good_step(s, 2)
    call, named = wrong_calls(session)[name]
    with pytest.raises(ValueError, match=rf"\b{named}"):
        call()
    assert session.free_tokens() == other.free_tokens() and session.step_tokens() == other.step_tokens()
    assert all(np.array_equal(*pair) for pair in zip(good_step(session, 2), good_step(other, 2), strict=True))


def test_arrays_that_could_not_be_written_to_are_refused() -> None:
    session = new_session("gpt")
    session.admit([], [[3]], 1)
    fixed = np.empty((1, VOCAB), np.float32)
    fixed.flags.writeable = False
    for logits in (fixed, np.empty((1, VOCAB), np.float64), np.empty((1, VOCAB), np.int16), np.empty((VOCAB, 1)).T):
        with pytest.raises((ValueError, TypeError)):
            session.step([3], 1, True, [0], logits, 1)


def test_a_row_ends_at_max_len_and_others_continue() -> None:
    session = new_session("gpt")
    session.admit([], [[3] * 19, [4]], 1)
    good_step(session, 2)
    with pytest.raises(ValueError, match=r"\bmax_len\b"):
        good_step(session, 2)
    session.release([0])
    alone = new_session("gpt")
    alone.admit([], [[4]], 1)
    good_step(alone, 1)
    assert all(np.array_equal(*pair) for pair in zip(good_step(session, 1), good_step(alone, 1), strict=True))


@pytest.mark.parametrize("tokens", [-1, -(2**63), 2**31, 2**62, 2**63 - 1])
def test_impossible_caches(tokens) -> None:
    with pytest.raises((ValueError, MemoryError)):
        EXT.Session(EXT.PackedModel(*parts("gpt")), tokens)


def searches_or_says_why_not(kind: str, arguments: list[Any], candidates: Any, values: Any, first: int) -> None:
    try:
        if kind == "greedy":
            search = EXT.greedy_search(arguments[0], arguments[1], 0, arguments[6])
        else:
            search = EXT.beam_search(*arguments[:6], 0, *arguments[6:])
        for _ in range(3):
            search.advance(candidates, values, first)
            EXT.last_tokens([search, search])
            search.tokens(first)
            assert len(search.results()) <= max(1, arguments[4])
    except ERRORS:
        return


queries = given(
    st.sampled_from(["greedy", "beams"]),
    st.tuples(ints, lists, ints, st.floats(), ints, st.booleans(), lists, st.booleans(), st.booleans(), ints).map(list),
    st.lists(st.lists(ints, max_size=9), max_size=5),
    st.lists(st.lists(st.floats(width=32), max_size=9), max_size=5),
    st.integers(-2, 3),
)
test_a_search_goes_on_or_says_why_not = FEW(queries(searches_or_says_why_not))
test_many_searches_go_on_or_say_why_not = pytest.mark.slow(MANY(queries(searches_or_says_why_not)))


@FEW
@given(arrays, arrays, arrays, st.sampled_from(["fp32", "bf16", "int8", "int4", "", "fp16"]))
def test_arrays_are_multiplied_or_refused(x: Any, weight: Any, bias: Any, precision: str) -> None:
    try:
        product = EXT.packed_linear(x, weight, bias, precision)
    except ERRORS:
        return
    assert product.shape == (np.shape(x)[0], np.shape(weight)[0])


def test_two_threads_on_one_session_get_an_error() -> None:
    session = EXT.Session(EXT.PackedModel(*parts("gpt")), 200 * 32)
    session.admit([], [[3 + i % 8] for i in range(200)], 1)
    errors: list[str] = []
    sound = 0
    barrier = threading.Barrier(2)

    def use() -> None:
        nonlocal sound
        barrier.wait()
        for _ in range(8):
            try:
                session.step([4] * 200, 2, True, [], None, 1)
                sound += 1
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(use) for _ in range(2)]:
            future.result()
    assert sound and len(errors) + sound == 16  # whoever holds it goes on
    assert all("thread" in text for text in errors)


def test_a_forked_child_continues_with_its_own_copy_while_helpers_run() -> None:
    model = drawn(GPT, vocab_size=1100, d_model=264, num_heads=2, d_ff=700, num_layers=2)
    packed = EXT.PackedModel(pack_options(model, "fp32"), pack_tensors(model, "fp32"))

    def begun() -> Any:
        session = EXT.Session(packed, 1024)
        session.admit([], [[3, 4, 5], [6, 7]] * 4, 2)
        for _ in range(5):
            session.step([8] * 8, 3, True, [], None, 2)
        return session

    def rest(session: Any) -> list[np.ndarray]:
        first = session.step([9] * 8, 3, True, [], None, 2)
        session.release([0, 1])
        return [*first, *session.step([9] * 6, 3, True, [], None, 2)]

    due, session = rest(begun()), begun()

    def check() -> None:
        assert all(np.array_equal(*pair) for pair in zip(rest(session), due, strict=True))

    in_child(check)
    check()


def others_run_during(call: Callable[[], object]) -> bool:
    """Returns whether another Python thread runs during a call, as it can only if the call releases the GIL."""
    begins, is_over = threading.Event(), False

    def begin_and_call() -> None:
        nonlocal is_over
        begins.set()
        call()
        is_over = True

    caller = threading.Thread(target=begin_and_call)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that no thread has to give up the GIL between two lines
    try:
        caller.start()
        begins.wait()
        return not is_over
    finally:
        sys.setswitchinterval(interval)
        caller.join()


def test_other_threads_run_while_a_session_computes() -> None:
    sizes = {"vocab_size": 4000, "d_model": 256, "num_heads": 4, "d_ff": 2000, "num_layers": 3, "max_len": 512}
    model = drawn(GPT, **sizes)
    packed = EXT.PackedModel(pack_options(model, "fp32"), pack_tensors(model, "fp32"))

    def call_of(name: str, *arguments: Any) -> Callable[[], object]:
        session = EXT.Session(packed, 3000)
        if name != "admit":
            session.admit([[]], [[5] * 511], 1)  # which the next call computes
        return functools.partial(getattr(session, name), *arguments)

    calls: list[tuple[Any, ...]] = [
        ("admit", [[]], [[5 + i] * 511 for i in range(4)], 1),
        ("step", [5], 1, True, [], None, 1),
        ("reorder", [[0]]),
        ("release", [0]),
    ]
    for call in calls:
        # A busy machine may not let the other thread run in time; without a release of the GIL, it never does.
        assert any(others_run_during(call_of(*call)) for _ in range(20)), call[0]


def test_a_child_packs_a_model_while_another_thread_did() -> None:
    of_model = parts("gpt")
    goes_on = True

    def keep_packing() -> None:
        while goes_on:
            EXT.PackedModel(*of_model)

    packer = threading.Thread(target=keep_packing)
    packer.start()
    try:
        for _ in range(20):
            in_child(lambda: EXT.PackedModel(*of_model))
    finally:
        goes_on = False
        packer.join()


# A step whose candidates need more memory than the process may have, with one thread and with several; then one of a
# single candidate, which has to be that of a session without such an error.
def _run_out_of_memory() -> None:
    vocab, rows = 100_000, 200
    model = drawn(GPT, vocab_size=vocab, d_model=8, num_heads=1, d_ff=8, num_layers=1, max_len=40)
    packed = EXT.PackedModel(pack_options(model, "fp32"), pack_tensors(model, "fp32"))
    sessions = [EXT.Session(packed, rows * 48) for _ in range(2)]
    for session in sessions:
        session.admit([], [[i % vocab] * (i % 18) for i in range(rows)], 1)
        session.step([3] * rows, 1, True, [], None, 1)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**25, before[1]))
    with pytest.raises(MemoryError):
        sessions[0].step([4] * rows, vocab, True, [], None, 1)
    resource.setrlimit(resource.RLIMIT_AS, before)
    one, two = ([session.step([5] * rows, 1, True, [], None, 1) for _ in range(3)] for session in sessions)
    assert all(np.array_equal(*pair) for steps in zip(one, two, strict=True) for pair in zip(*steps, strict=True))


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer itself needs the memory")
def test_a_step_that_runs_out_of_memory_changes_nothing() -> None:
    in_child(_run_out_of_memory)


@pytest.mark.parametrize("where", ["embedding.weight", "decoder.layers.0.linear1.weight", "output.weight"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_only_rows_with_broken_numbers_are_errors(number, where) -> None:
    model = drawn(GPT, **SIZES, num_layers=1, tie_embeddings=False)
    options, tensors = dict(pack_options(model, "fp32")), dict(pack_tensors(model, "fp32"))
    plain = EXT.Session(EXT.PackedModel(options, tensors), 64)
    name = {"embedding.weight": "target_embedding", "output.weight": "output"}.get(where, where)
    broken = torch.tensor(tensors[name])
    broken[5 if where != "decoder.layers.0.linear1.weight" else slice(None)] = number
    tensors[name] = broken.numpy()
    session = EXT.Session(EXT.PackedModel(options, tensors), 64)
    for s in (plain, session):
        s.admit([], [[4], [3]], 1)
    _, values = session.step([5, 6], 3, True, [], None, 1)
    if where == "embedding.weight":
        assert np.isnan(values[0]).all() and np.array_equal(values[1], plain.step([5, 6], 3, True, [], None, 1)[1][1])
    else:
        assert np.isnan(values).all()
