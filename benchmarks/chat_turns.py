"""Measures the time to the first token in each turn of a chat, whose prompt is the whole conversation.

    python -m benchmarks.chat_turns [--turns 20] [--system 1000] [--precision int8] [--out FILE]

The model has Llama's shape (12 layers of 1,024, 16 heads, 4 of them for keys and values) and random weights: times
don't depend on them. A `Generator` caches the prompts, and `generate` reads the whole prompt in every turn. The two
alternate, and a clock is read at the first token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.generation import Generator
from fastformer.models import GPT

_VOCAB = 32_000


def make_model(layers: int = 12, dim: int = 1024, max_len: int = 4096) -> GPT:
    """Makes a model of Llama's shape."""
    torch.manual_seed(0)
    config = GPT.config_class(
        vocab_size=_VOCAB, d_model=dim, num_heads=dim // 64, num_kv_heads=max(1, dim // 256), num_layers=layers,
        d_ff=dim * 11 // 4, max_len=max_len, positions="rotary", norm="rms", activation="swiglu", bias=False,
    )  # fmt: skip
    return GPT(config).eval()


def first_token(generator: Generator, prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
    """Returns the seconds to the first token of an answer, and the answer."""
    began = time.perf_counter()
    answer: Iterator[int] = generator.stream(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    tokens = [next(answer)]
    return time.perf_counter() - began, tokens + list(answer)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each turn."""
    parser = parser_of("chat_turns", __doc__, out=True)
    parser.add_argument("--turns", type=int, default=20, help="questions, each with its answer")
    parser.add_argument("--system", type=int, default=1000, help="tokens that each prompt begins with")
    parser.add_argument("--question", type=int, default=24, help="tokens of each question")
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--precision", default="int8", help="of the C++ engine")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--dim", type=int, default=1024, help="of the model, a multiple of 64")
    parser.add_argument("--threads", type=int, help="of torch")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    longest = options.system + options.turns * (options.question + options.answer)
    model = make_model(options.layers, options.dim, longest)
    keeps, reads = (Generator(model, precision=options.precision) for _ in range(2))
    text: list[int] = torch.randint(3, _VOCAB, (options.system,)).tolist()
    for generator in (keeps, reads):  # packs the weights, and touches the memory
        first_token(generator, [5, 6, 7], 2)
    times: dict[str, list[float]] = {"Generator": [], "generate": []}
    read_tokens: list[int] = []
    for turn in range(options.turns):
        text += torch.randint(3, _VOCAB, (options.question,)).tolist()
        before = keeps.stats()
        seconds, answer = first_token(keeps, text, options.answer)
        stats = keeps.stats()
        times["Generator"].append(1e3 * seconds)
        read_tokens.append(stats.read_tokens - before.read_tokens)
        reads.clear()
        seconds, (token,) = first_token(reads, text, 1)
        times["generate"].append(1e3 * seconds)
        if token != answer[0]:
            raise RuntimeError(f"expected the same first token in turn {turn + 1}, got {answer[0]} and {token}")
        print(
            f"turn {turn + 1:>2}: a prompt of {len(text):,}, {read_tokens[-1]:,} of it read: first token after "
            f"{times['Generator'][-1]:,.0f} ms; all of it read: {times['generate'][-1]:,.0f} ms"
        )
        text += answer
    shared = record.environment("cpu")
    for provider, turn_times in times.items():
        row = {
            "suite": "decoding",
            "op": "chat_turns",
            "provider": provider,
            "precision": options.precision,
            "shape": {
                "system": options.system, "question": options.question, "answer": options.answer,
                "layers": options.layers, "d_model": options.dim,
            },
            "curve": {
                "x": list(range(1, len(turn_times) + 1)),
                "y": turn_times,
                "x_label": "turn of the chat",
                "y_label": "ms to the first token",
            },
        }  # fmt: skip
        record.append(options.out, row | shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
