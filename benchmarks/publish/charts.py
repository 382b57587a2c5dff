"""The content of each picture: its rows, and how they are drawn. `CHARTS` has all pictures by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import EXPERIMENTS
from benchmarks.measure.scaling_fits import fit
from benchmarks.publish import style
from benchmarks.publish.latest import Results, Row, case_of, grouped, machine, was_timed
from benchmarks.publish.summary import DROP_IN, LLAMA, MODELS, MODULES, OPS, PEERS, WELL_KNOWN, Comparison, TableCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        command: the command that makes its rows.
        select: the results -> the rows that it is drawn from; empty if it can't be drawn.
        draw: these rows -> the picture.
    """

    command: str
    select: Callable[[Results], list[Row]]
    draw: Callable[[list[Row]], Figure]


_NAMES = {
    "baseline": "the plain Transformer",
    "fastformer.baseline": "the plain Transformer",
    "eager": "eager PyTorch",
    "sdpa": "PyTorch's SDPA",
    "torch.nn eager": "torch.nn",
    "as it is": "the model as it is",
    "sdpa causal": "PyTorch's SDPA causal",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
    "sentence-transformers, onnxruntime": "sentence-transformers on ONNX Runtime",
    "sentence-transformers, openvino": "sentence-transformers on OpenVINO",
    "ctranslate2": "CTranslate2",
    "converted": "the converted model",
    "plain": "one token a step",
    "free": "no constraint",
    "none": "no adapter",
}


def name_of(provider: str) -> str:
    """Returns the name of a provider for readers."""
    return _NAMES.get(provider, provider)


# Speed-ups as bars


def compare(rows: list[Row], cases: Iterable[TableCase]) -> list[Comparison]:
    """Compares fastformer with each rival, in the cases that were measured."""
    return [comparison for case in cases for comparison in case.comparisons(rows)]


def select_cases(cases: Sequence[TableCase], results: Results) -> list[Row]:
    """Returns the rows of the comparisons of these cases."""
    chosen: dict[int, Row] = {}
    for comparison in compare(results.rows, cases):
        for row in (comparison.ours, comparison.rival):
            chosen[id(row)] = row
    return list(chosen.values())


def draw_speedups(title: str, cases: Sequence[TableCase], rows: list[Row]) -> Figure:
    """Draws how many times faster fastformer is than a rival: bars from 1 to the right, to the left if slower."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    comparisons = compare(rows, cases)
    panels = list(dict.fromkeys(c.panel for c in comparisons))
    # A position for a (case, rival), from top to bottom, the same in all panels.
    places: dict[tuple[str, str], float] = {}
    heights: dict[str, list[float]] = {}
    height = 0.0
    for case in cases:
        for rival in dict.fromkeys(c.against for c in comparisons if c.label == case.label):
            places[case.label, rival] = height
            heights.setdefault(case.label, []).append(height)
            height += 1.0
        if case.label in heights:
            height += 0.7
    fig = style.figure(title, footer=machine(rows), columns=len(panels), height=1.35 + 0.2 * height)
    low = min(0.8, *(c.ratio / 1.12 for c in comparisons))
    high = max(2.0, *(c.ratio for c in comparisons)) * 1.5
    for axes, panel in zip(fig.axes, panels, strict=True):
        axes.set_xscale("log")
        axes.set(xlim=(low, high), ylim=(height - 1.0, -0.8))
        for c in comparisons:
            if c.panel != panel:
                continue
            y = places[c.label, c.against]
            color, label = style.color_of(c.against), f"than {name_of(c.against)}"
            axes.barh(y, c.ratio - 1, left=1, height=0.86, color=color, label=label)
            axes.text(max(c.ratio, 1.0) * 1.06, y, style.two_digits(c.ratio), va="center", fontsize=8, color=style.INK)
        axes.axvline(1, color=style.INK, linewidth=1)
        axes.axvspan(low, 1, color="#808080", alpha=0.12, linewidth=0)
        ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}x"))
        axes.set_yticks([sum(ys) / len(ys) for ys in heights.values()], list(heights) if axes is fig.axes[0] else [])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_title(panel, loc="left", fontsize=10)
    fig.axes[0].set_xlabel("times faster (left of 1x: slower)", fontsize=9)
    style.legend(fig)
    return fig


# Scaling


def _grown(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Returns a line's name with its exponent (`benchmarks.measure.scaling_fits`), if there are enough points."""
    try:
        return f"{name}: n^{fit(dict(points)).exponent:.1f}"
    except ValueError:
        return name


def select_scaling(results: Results) -> list[Row]:
    """Selects the fp32 rows."""
    return results.find(was_timed, suite="scaling", dtype="float32")


def draw_scaling(rows: list[Row]) -> Figure:
    """Draws time and memory over the length, both axes logarithmic, with exponents after the names."""
    fig = style.figure(
        "Time and memory over the length of a sequence, forward and backward",
        footer=machine(rows),
        columns=2,
        height=4.2,
    )
    for axes, field, label in zip(
        fig.axes, ("ms_p50", "peak_mib"), ("ms", "peak memory beside the inputs (MiB)"), strict=True
    ):
        for name, provider_rows in grouped(rows, itemgetter("provider")).items():
            points = sorted((row["shape"]["seqlen"], row[field]) for row in provider_rows if row.get(field))
            if not points:
                continue
            x, y = zip(*points, strict=True)
            axes.plot(
                x, y, color=style.color_of(name), linestyle=_dashes(name), marker="o", markersize=3,
                label=_grown(name, points),
            )  # fmt: skip
        _logarithmic(axes, x=2, y=10)
        axes.set(xlabel="n, positions", ylabel=label)
        style.label_lines(axes)
    return fig


def _dashes(name: str) -> Any:
    for word, dashes in (("window", (0, (1, 1.2))), ("causal", (0, (4, 1.5))), ("reference", (0, (6, 1, 1, 1)))):
        if word in name:
            return dashes
    return "-"


def _logarithmic(axes: Axes, **bases: int) -> None:
    """Makes axes logarithmic, "x" or "y" with these bases, with plain numbers at their ticks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name, base in bases.items():
        getattr(axes, f"set_{name}scale")("log", base=base)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())


# Decoding

STAGES = {
    "recompute": "recompute: everything, for each token",
    "encode_once": "encode_once: the encoder's output is kept",
    "cross_cache": "cross_cache: its keys and values are kept",
    "kv_cache": "kv_cache: the decoder's own, too",
    "cpp": "cpp: the engine in C++, fp32",
    "cpp_bf16": "cpp, bf16",
    "cpp_int8": "cpp, int8",
}


def select_stages(results: Results) -> list[Row]:
    """Selects greedy decoding with the base model: the case with the most steps, its latest run, its most threads."""
    greedy = results.find(was_timed, op="decoding", preset="base", num_beams=1, provider=tuple(STAGES))

    def rank(rows: list[Row]) -> tuple[int, str, int, int]:
        return len(rows), rows[0]["time"], rows[0]["threads"], -rows[0]["shape"]["batch"]

    best = max(grouped(greedy, case_of).values(), key=rank, default=[])
    return sorted(best, key=lambda row: list(STAGES).index(row["provider"]))


def draw_stages(rows: list[Row]) -> Figure:
    """Draws the tokens a second of each step."""
    shape = rows[0]["shape"]
    fig = style.figure(
        f"Greedy decoding, step by step: base model, {shape['batch']} sentences", footer=machine(rows), height=3.2
    )
    (axes,) = fig.axes
    first = rows[0]["ms_p50"]
    for row_index, row in enumerate(rows):
        name = row["provider"]
        is_ours = name.startswith("cpp") or name == "kv_cache"
        axes.barh(row_index, row["tokens_s"], height=0.7, color=style.OURS if is_ours else style.GREY)
        text = f"{row['tokens_s']:,.0f} tokens/s, {style.two_digits(first / row['ms_p50'])}x"
        axes.text(row["tokens_s"] * 1.05, row_index, text, va="center", fontsize=9)
    _logarithmic(axes, x=10)
    low, high = min(row["tokens_s"] for row in rows), max(row["tokens_s"] for row in rows)
    axes.set(xlim=(low / 2, high * 6), ylim=(len(rows) - 0.4, -0.6), xlabel="tokens a second")
    axes.set_yticks(range(len(rows)), [STAGES[row["provider"]] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    return fig


def select_throughput(results: Results) -> list[Row]:
    """Selects greedy decoding with the base model: shapes that differ only in the batch size, with the most sizes."""
    operations = ("decoding", "decoding_batches")
    greedy = results.find(was_timed, op=operations, preset="base", num_beams=1, provider=tuple(STAGES))

    def family(row: Row) -> str:
        rest = {key: value for key, value in row["shape"].items() if key not in ("batch", "threads")}
        return json.dumps(rest, sort_keys=True)

    def batches(rows: list[Row]) -> int:
        return len({row["shape"]["batch"] for row in rows})

    most = max(grouped(greedy, family).values(), key=batches, default=[])
    return most if batches(most) > 1 else []


def draw_throughput(rows: list[Row]) -> Figure:
    """Draws tokens a second over the batch size; one thread is dashed."""
    fig = style.figure("Tokens a second over the batch: greedy, base model", footer=machine(rows), height=4.0)
    (axes,) = fig.axes
    most = max(row["threads"] for row in rows)
    for (name, threads), provider_rows in grouped(rows, itemgetter("provider", "threads")).items():
        points = sorted((row["shape"]["batch"], row["tokens_s"]) for row in provider_rows)
        label = name.replace("_", ", ") if name.startswith("cpp") else name
        axes.plot(
            *zip(*points, strict=True), color=_engine_color(name), marker="o", markersize=4,
            linestyle="-" if threads == most else (0, (4, 1.5)),
            label=label if threads == most else f"{label}, {threads} thread{'s' * (threads > 1)}",
        )  # fmt: skip
    _logarithmic(axes, x=2, y=10)
    axes.set(xlabel="sentences in the batch", ylabel="tokens a second")
    style.label_lines(axes)
    return fig


def select_token_times(results: Results) -> list[Row]:
    """Selects the rows of the model with the most lines."""
    groups = grouped(results.find(op="token_times"), itemgetter("model", "threads"))
    return max(groups.values(), key=len, default=[])


def draw_token_times(rows: list[Row]) -> Figure:
    """Draws the time of each token against its position."""
    title = f"The time of a token over its position: one input, greedy ({rows[0]['model']})"
    fig = style.figure(title, footer=machine(rows), height=4.2)
    (axes,) = fig.axes
    for row in rows:
        name, curve = row["provider"], row["curve"]
        label = f"{name}, {row['precision']}" if name == "cpp" else name
        dashes = {"bf16": (0, (4, 1.5)), "int8": (0, (1, 1.2))}.get(row["precision"], "-")
        axes.plot(curve["x"], curve["y"], color=_engine_color(name), linestyle=dashes, linewidth=1.4, label=label)
    _logarithmic(axes, y=10)
    axes.set(xlabel=rows[0]["curve"]["x_label"], ylabel=rows[0]["curve"]["y_label"])
    style.label_lines(axes)
    return fig


def _engine_color(name: str) -> str:
    plain = {"recompute": style.GREY, "encode_once": style.PURPLE, "cross_cache": style.SKY, "kv_cache": style.BLUE}
    return plain.get(name, style.OURS)


def _speedups(title: str, command: str, cases: Sequence[TableCase]) -> Chart:
    return Chart(command, functools.partial(select_cases, cases), functools.partial(draw_speedups, title, cases))


_RUN = "python -m benchmarks.run --suite {} --out benchmarks/results/cpu.jsonl"

CHARTS: dict[str, Chart] = {
    "well_known": _speedups(
        "On two cores: how many times faster than the programs that you know",
        "python -m benchmarks.peers --case minilm (and base, llama, bert_base), python -m benchmarks.speech",
        WELL_KNOWN,
    ),
    "ops": _speedups("Single ops: how many times faster than the same in PyTorch", _RUN.format("ops"), OPS),
    "modules": _speedups("Modules: how many times faster", _RUN.format("modules"), MODULES),
    "models": _speedups("Models: how many times faster", _RUN.format("model"), MODELS),
    "drop_in": _speedups("Models after fastformer.accelerate: how many times faster", _RUN.format("model"), DROP_IN),
    "peers": _speedups(
        "Decoding: how many times faster than other engines on the same weights", _RUN.format("decoding"), PEERS
    ),
    "llama": _speedups(
        "A model of Llama's form, 168 M parameters: how many times faster",
        "python -m benchmarks.peers --case llama --precision int4 int8 bf16 fp32 --rounds 3 "
        "--out benchmarks/results/cpu.jsonl",
        LLAMA,
    ),
    "scaling": Chart(_RUN.format("scaling"), select_scaling, draw_scaling),
    "decoding_ladder": Chart(_RUN.format("decoding"), select_stages, draw_stages),
    "decoding_throughput": Chart(_RUN.format("decoding"), select_throughput, draw_throughput),
    "token_times": Chart(
        "python -m benchmarks.token_times base --out benchmarks/results/token_times.jsonl",
        select_token_times,
        draw_token_times,
    ),
}


def charts() -> dict[str, Chart]:
    """Returns all pictures; those of the experiments come last, each drawn by its own module."""
    return CHARTS | {f"experiment_{name}": _experiment(name) for name in EXPERIMENTS}


def _experiment(name: str) -> Chart:
    """Makes the picture of the last run of an experiment."""
    from benchmarks.experiments.experiment import last_run, load

    return Chart(
        f"python -m benchmarks.experiments.{name} --out benchmarks/results/experiments.jsonl",
        lambda results: last_run(results.find(suite="experiments"), name),
        lambda rows: load(name).figure(rows),
    )
