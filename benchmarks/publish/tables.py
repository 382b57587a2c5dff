"""Makes the tables of README.md and docs/benchmarks/ in Markdown: `TABLES` has a function for each.

A cell is a field of one line, or the ratio of two lines of one run. The text around a table is written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases.models.bench_scaling import EXPECTED
from benchmarks.measure.scaling_fits import groups, growth
from benchmarks.publish.charts import name_of
from benchmarks.publish.latest import (
    AT_FULL_RATE,
    GPU_FORMS,
    WITH_AMX,
    WITHOUT_AVX512,
    Results,
    Row,
    platform_of,
    value_of,
    was_timed,
)
from benchmarks.publish.style import two_digits
from benchmarks.publish.summary import (
    ADAPTERS,
    AMX_PEERS,
    AVX2,
    AVX2_PEERS,
    COMING_FROM,
    CONSTRAINTS,
    DRAFTS,
    DROP_IN,
    ENCODERS_INT8,
    GENERATE,
    HEADLINES,
    LLAMA,
    MODELS,
    MODULES,
    OPS,
    PEERS,
    SMALL_WORK,
    TODAYS_ENCODERS,
    TRAINED_DRAFTS,
    Comparison,
    Headline,
    TableCase,
    size_of,
)

NOT_MEASURED = "not measured"
# The CPU of a kind of results that has tables of its own.
_CPUS = {
    WITHOUT_AVX512: "without AVX-512",
    AT_FULL_RATE: "where PyTorch has the CPU's whole rate",
    WITH_AMX: "with AMX",
}


class Figure(NamedTuple):
    """A figure on a page."""

    text: str
    what: str
    origin: str  # files and lines
    command: str


class Numbers:
    """The results as text, with a record of the figures that were used.

    Attributes:
        results: the results.
        figures: the figures that were used.
        missing: the requested figures that don't exist.
        compared: the comparisons that were used, each with its figure and the kind of its results.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.figures: list[Figure] = []
        self.missing: list[str] = []
        self.compared: list[tuple[Comparison, Figure, str | None]] = []

    def of(self, kind: str) -> Numbers:
        """Returns the results of another kind in the same folder; it records here what is used of them."""
        numbers = Numbers(Results(self.results.folder, kind=kind))
        numbers.figures, numbers.missing, numbers.compared = self.figures, self.missing, self.compared
        return numbers

    def value(self, field: str, show: Callable[[float], str] = two_digits, /, **where: Any) -> str:
        """Formats a field of the one line that has these fields, in the latest run that has such lines.

        Raises:
            ValueError: several lines of that run have them.
        """
        rows = self.results.find(**where)
        latest = max((row.get("time") or "" for row in rows), default="")
        rows = [row for row in rows if (row.get("time") or "") == latest]
        if len(rows) > 1:
            origins = ", ".join(self.results.origin(row) for row in rows)
            raise ValueError(f"expected one line with {where}, got {origins}")
        number = value_of(rows[0], field) if rows else None
        if not isinstance(number, (int, float)):
            return self._lacking(f"{field} of {where}")
        return self.shown(show(number), f"{field} of {where}", rows)

    def ratio(self, case: TableCase, panel: str, against: str) -> str:
        """Formats how many times faster fastformer is, with a mark if that is uncertain."""
        comparisons = case.comparisons(self.results.rows)
        for comparison in comparisons:
            if (comparison.panel, comparison.against) == (panel, against):
                text = two_digits(comparison.ratio) + "~" * comparison.is_unsteady
                what = f"{case.label}, {panel}, against {against}"
                self.shown(text, what, [comparison.ours, comparison.rival])
                self.compared.append((comparison, self.figures[-1], self.results.kind))
                return text
        return self._lacking(f"{case.label}, {panel}, against {against}")

    def shown(self, text: str, what: str, rows: Sequence[Row]) -> str:
        """Records the text as made from these rows, and returns it."""
        origin = ", ".join(map(self.results.origin, rows))
        commands = dict.fromkeys(str(row.get("command")) for row in rows)
        self.figures.append(Figure(text, what, origin, "; ".join(commands)))
        return text

    def _lacking(self, what: str) -> str:
        self.missing.append(what)
        return NOT_MEASURED


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table in Markdown; "" without rows."""
    lines = [head, ["---"] * len(head), *rows]
    if len(lines) == 2:
        return ""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _panels(case: TableCase, measured: Iterable[Comparison], rival: str, measured_alone: bool) -> list[str]:
    """Returns the panels of a case beside a rival, in order: those that were measured, and those that have to be."""
    there = {comparison.panel for comparison in measured if comparison.against == rival}
    is_due = rival in case.against and not measured_alone
    return [panel.name for panel in case.panels if is_due or panel.name in there]


def times_faster(cases: Sequence[TableCase], numbers: Numbers, *, measured_alone: bool = False) -> str:
    """Makes a line for each case, a column for each rival; the formats in a cell, as `2.2 · –`; "" without any case.

    measured_alone: omit cells that were not measured, instead of saying so.
    """
    rows = numbers.results.rows
    measured = {case.label: list(case.comparisons(rows)) for case in cases}
    if measured_alone:
        cases = [case for case in cases if measured[case.label]]
    there = {comparison.against for group in measured.values() for comparison in group}
    rivals = dict.fromkeys(rival for case in cases for rival in case.rivals(rows))
    rivals = {rival: None for rival in rivals if rival in there or not measured_alone}
    panels = dict.fromkeys(panel.name for case in cases for panel in case.panels)
    if measured_alone:
        shown_panels = {comparison.panel for group in measured.values() for comparison in group}
        panels = {name: None for name in panels if name in shown_panels}
    lines = []
    for case in cases:
        groups = [_panels(case, measured[case.label], rival, measured_alone) for rival in rivals]
        cells = [
            " · ".join(numbers.ratio(case, name, rival) if name in group else "–" for name in panels) if group else ""
            for rival, group in zip(rivals, groups, strict=True)
        ]
        lines.append([case.label, *cells])
    return table([f"times faster, {' · '.join(panels)}, than", *map(name_of, rivals)], lines)


def beside_engines(cases: Sequence[TableCase], numbers: Numbers) -> str:
    """Makes a line for each case and rival, a column for each precision."""
    names = [panel.name for panel in cases[0].panels]
    lines = []
    for case in cases:
        measured = list(case.comparisons(numbers.results.rows))
        for rival in case.rivals(numbers.results.rows):
            if panels := _panels(case, measured, rival, measured_alone=False):
                cells = [numbers.ratio(case, name, rival) if name in panels else "" for name in names]
                lines.append([case.label, *cells, name_of(rival)])
    return table(["times faster", *names, "than"], lines)


def elsewhere(kind: str, make: Callable[[Numbers], str], numbers: Numbers) -> str:
    """Makes a table from the lines of another kind; "" if there are none."""
    other = numbers.of(kind)
    if other.results.rows:
        return make(other)
    numbers.missing.append(f"lines of {kind}.jsonl")
    return ""


def summary(headlines: Sequence[Headline], numbers: Numbers) -> str:
    """Makes a table for a newcomer, in words, of the cases that were measured."""
    lines, devices = [], set()
    for does, case, panel, rivals in headlines:
        if not (rows := case.rows(numbers.results.rows)):
            continue
        devices |= {row["device"].split(",")[0].replace("(R)", "").removesuffix(" Processor") for row in rows}
        figures = [f"{numbers.ratio(case, panel.name, rival)} times as fast as {name_of(rival)}" for rival in rivals]
        lines.append([f"{does}, {panel.name}", ", ".join(figures)])
    return table(["fastformer", f"on two cores of {', '.join(sorted(devices))}"], lines)


def losses(numbers: Numbers) -> str:
    """Makes the table of all comparisons in the other tables that fastformer loses, worst first."""
    others = Numbers(numbers.results)
    for make in TABLES.values():
        if make is not losses:
            make(others)
    once = {figure.origin: (pair, figure, kind) for pair, figure, kind in others.compared}  # of several tables
    lines = []
    for pair, figure, kind in sorted(once.values(), key=lambda one: one[0].ratio):
        shown = figure.text.rstrip("~")
        if float(shown.replace(",", "")) < 1:
            numbers.figures.append(figure)
            where = "" if kind is None else f", {_CPUS[kind]}"
            lines.append([f"{pair.label}, {pair.panel}{where}", shown, name_of(pair.against)])
    return table(["", "relative speed", "compared with"], lines) or "Nowhere in these tables."


def small_work(numbers: Numbers) -> str:
    """Makes the table of encoders so small that the overhead of a call counts; "" until measured."""
    measured = numbers.results.rows
    lines = []
    for size, columns in SMALL_WORK.items():
        if any(list(case.comparisons(measured)) for cases in columns.values() for case in cases):
            cells = (
                " · ".join(numbers.ratio(case, "fp32", "torch.nn") for case in cases) for cases in columns.values()
            )
            lines.append([size_of(size), *cells])
    names = {"fastformer": "fastformer.nn"}
    head = [
        f"{'training' if learns else 'evaluation'}, {names.get(ours, ours)}"
        for learns, ours in next(iter(SMALL_WORK.values()))
    ]
    return table(["of torch.nn's speed, 1 · 2 threads", *head], lines)


def llama(numbers: Numbers) -> str:
    """Makes a line for each program and precision: the time to the first token, tokens a second; "" until measured."""
    rows = numbers.results.find(op="peers", model="llama")
    latest = max((row.get("time") or "" for row in rows), default="")
    things = dict.fromkeys((row["precision"], row["provider"]) for row in rows if (row.get("time") or "") == latest)
    lines = []
    for precision, provider in things:
        cells = []
        for case in LLAMA:
            where = {**case.where, "provider": provider, "precision": precision}
            field = "ms_p50" if case.where["new"] == 1 else "tokens_s"
            there = any(field in row for row in numbers.results.find(**where))
            cells.append(numbers.value(field, **where) if there else "")
            if case is LLAMA[1]:  # one row, and most of its time are steps
                cells.append(numbers.value("share_of_dram", "{:.0%}".format, **where) if there else "")
        if any(cells):
            lines.append([f"{name_of(provider)}, {precision}", *cells])
    head = [f"{case.label}, {'ms' if case.where['new'] == 1 else 'tokens/s'}" for case in LLAMA]
    head.insert(2, "its share of the speed of reading")
    return table(["", *head], lines)


def accelerated_generate(numbers: Numbers) -> str:
    """Makes the table of accelerated models' `generate`; "" until measured."""
    rows = numbers.results.rows
    measured = [case for case in GENERATE if list(case.comparisons(rows))]
    rivals = dict.fromkeys(rival for case in measured for rival in case.against)
    lines = [
        [case.label, *(numbers.ratio(case, "fp32", rival) if rival in case.against else "" for rival in rivals)]
        for case in measured
    ]
    return table(["times faster than", *map(name_of, rivals)], lines)


def embedding(numbers: Numbers) -> str:
    """Makes a line for each program and format, a column for each order of the sentences; "" until measured."""
    where = {"op": "drop_in", "mode": "embedding", "model": "minilm"}
    rows = [row for row in numbers.results.find(**where) if was_timed(row)]
    orders = dict.fromkeys(row["shape"]["order"] for row in rows)
    lines = []
    for dtype, provider in dict.fromkeys((row["dtype"], row["provider"]) for row in rows):
        cells = []
        for order in orders:
            here = {**where, "dtype": dtype, "provider": provider, "order": order}
            there = any(was_timed(row) for row in numbers.results.find(**here))
            cells.append(numbers.value("ms_p50", **here) if there else "")
        lines.append([f"{name_of(provider)}, {dtype}", *cells])
    return table(["milliseconds", *orders], lines)


def serving(numbers: Numbers) -> str:
    """Makes a line for each server of each model, a column for each number of clients; "" until measured."""
    rows = [row for row in numbers.results.find(op="serving") if was_timed(row)]
    clients = sorted({row["shape"]["clients"] for row in rows})
    lines = []
    for model, provider, precision in dict.fromkeys((row["model"], row["provider"], row["precision"]) for row in rows):
        where = {"op": "serving", "model": model, "provider": provider, "precision": precision}
        cells = []
        for count in clients:
            there = any(was_timed(row) for row in numbers.results.find(**where, clients=count))
            fields = ("requests_s", "ms_p50", "ms_p99") if there else ()
            cells.append(" · ".join(numbers.value(field, **where, clients=count) for field in fields))
        lines.append([model, f"{name_of(provider)}, {precision}", *cells])
    head = ["model", "requests/s · p50 ms · p99 ms", *(f"{count} client{'s' * (count > 1)}" for count in clients)]
    return table(head, lines)


def serving_losses(numbers: Numbers) -> str:
    """Makes the table of servers that answer more requests than fastformer's, worst first; "" until measured."""
    rows = [row for row in numbers.results.find(op="serving") if was_timed(row) and "ours" in row]
    slower = sorted((row for row in rows if row["ours"] < 1), key=lambda row: float(row["ours"]))
    lines = []
    for row in slower:
        what = f"{row['model']}, {row['shape']['clients']} clients, {row['precision']}"
        shown = numbers.shown(two_digits(row["ours"]), f"ours of {what}, {row['provider']}", [row])
        lines.append([what, shown, name_of(row["provider"])])
    return table(["", "relative requests/s", "compared with"], lines) or ("None." if rows else "")


def serving_costs(numbers: Numbers) -> str:
    """Makes the table of HTTP's overhead beside the library; "" until measured."""
    where = {"op": "serving_costs"}
    if not numbers.results.find(**where):
        return ""
    ms, share = "{:.1f} ms".format, "{:.2f} of it".format

    def of(field: str, show: Callable[[float], str], **more: Any) -> str:
        return numbers.value(field, show, **where, **more)

    server, edges = {"provider": "fastformer serve"}, ("ms_p50", "ms_p99")
    lines = [
        [f"a refusal by a full queue of 200 requests at once, {kind} connections", *(of(p, ms, **row) for p in edges)]
        for kind, row in (("open", {"new_connections": False}), ("new", {"new_connections": True}))
    ]  # fmt: skip
    for precision in ("int8", "fp32"):
        row = {"part": "one", "precision": precision}
        http, library = (of("ms_p50", ms, provider=name, **row) for name in ("fastformer serve", "AsyncTranslator"))
        lines.append(
            [f"one request, {precision}; `AsyncTranslator` takes {library}", http, of("value", ms, **server, **row)]
        )
    rate = of("requests_s", "{:.1f} texts/s".format, part="many", provider="Translator.translate")
    lines.append(
        [
            f"64 clients with 10 texts each; `Translator.translate` of all texts: {rate}",
            of("requests_s", "{:.1f} texts/s".format, **server, part="many"),
            of("speedup", share, **server, part="many"),
        ]
    )
    plain = of("tokens_s", "{:,.0f} tokens/s".format, part="stream", streams=0)
    streamed = of("tokens_s", "{:,.0f} tokens/s".format, part="stream", streams=1)
    lines.append(
        [f"15 clients and a stream; 16 clients: {plain}", streamed, of("speedup", share, part="stream", streams=1)]
    )
    return table(["", "the median, or the rate", "p99, beyond the library, or its share"], lines)


def processes(numbers: Numbers) -> str:
    """Makes a line for one process and for each way in which several share a training; "" until measured."""
    rows = numbers.results.find(op="processes")
    lines = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        where = {"op": "processes", "provider": provider}
        tokens = numbers.value("tokens_s", "{:,.0f}".format, **where)
        lines.append([provider, tokens, numbers.value("speedup", **where)])
    return table(["", "real tokens/s", "times one process"], lines)


def preparing(numbers: Numbers) -> str:
    """Makes the table of preparing a corpus beside the tokenizers library alone; "" until measured."""
    rows = [row for row in numbers.results.find(op="preparing") if row["shape"]["clock"] == "wall"]
    if not rows:
        return ""
    share = numbers.value("speedup", "{:.0%}".format, op="preparing", provider="fastformer prepare", clock="cpu")
    lines = [["the tokenizers library's share of the CPU time of one process", share]]
    for count in sorted({row["shape"]["processes"] for row in rows} - {1}):
        faster = numbers.value("speedup", op="preparing", provider="fastformer prepare", clock="wall", processes=count)
        lines.append([f"{count} processes, times as fast as one", faster])
    return table(["fastformer prepare", ""], lines)


def large_corpus(numbers: Numbers) -> str:
    """Makes the table of the peak memory of a process on a large corpus; "" until measured."""
    rows = numbers.results.find(op="large_corpus")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        where = {"op": "large_corpus", "model": model}
        show = "{:,.0f}".format
        cells = [numbers.value(field, show, **where) for field in ("pairs", "peak_mib")]
        lines.append([f"fastformer {model}", *cells])
    return table(["", "pairs", "most memory of a process, MiB"], lines)


def gpu_attention(numbers: Numbers) -> str:
    """Makes the table of attention on a GPU, milliseconds of the device, forward and backward; "" until measured.

    The kernels for sm_90 were measured in a run of their own, whose lines are in files of another kind. A form that
    fastformer uses by default has the column's figure.
    """
    rows = numbers.results.find(lambda row: bool(row.get("ms_device")), op="attention")
    forms = numbers.of(GPU_FORMS)
    lines = []
    for shape in sorted({tuple(row["shape"].items()) for row in rows}, key=repr):
        sizes = dict(shape)
        dropout = f", dropout {sizes['dropout_p']:g}" if sizes["dropout_p"] else ""
        cells = [f"{sizes['batch']} x {sizes['seqlen']:,}, {sizes['heads']} heads of {sizes['head_dim']}{dropout}"]
        for provider in ("fastformer", "sdpa cudnn", "sdpa flash"):
            of_passes = []
            for mode in ("fwd", "bwd"):
                where = {"op": "attention", "provider": provider, "mode": mode, **sizes}
                of_sm_90 = provider == "fastformer" and (mode == "bwd" or sizes["head_dim"] > 64)
                of_form = [
                    row for row in forms.results.find(**where)
                    if any(f"hopper_{mode}" in kernel for kernel in row["kernels"])
                ] if of_sm_90 else []  # fmt: skip
                source = forms if of_form else numbers
                of_passes.append(source.value("ms_device", "{:.2f}".format, **where))
            cells.append(" + ".join(of_passes))
        lines.append(cells)
    head = ["causal, bf16: ms forward + backward", "fastformer", "cuDNN", "PyTorch's FlashAttention-2"]
    return table(head, lines)


def gpu_ops(numbers: Numbers) -> str:
    """Makes the table of other ops on a GPU: milliseconds on the device, if measured, and of a call to an idle one."""
    rows = [
        row for row in numbers.results.find(suite="ops")
        if platform_of(row) == "cuda" and row["op"] not in ("attention", "packed_attention")
    ]  # fmt: skip
    lines = []
    for op, mode, shape in dict.fromkeys((row["op"], row["mode"], tuple(row["shape"].items())) for row in rows):
        sizes = " ".join(f"{name}={value}" for name, value in shape)
        cells = [f"{op} {mode}, {sizes}"]
        for provider in ("fastformer", "eager", "sdpa flash in order"):
            where = {"op": op, "mode": mode, "provider": provider, **dict(shape)}
            matches = numbers.results.find(**where)
            fields = [field for field in ("ms_device", "ms_p50") if matches and matches[0].get(field)]
            show = "{:.3f}".format
            shown = [numbers.value(field, show, **where) for field in fields]
            cells.append(" / ".join(["-"] * (2 - len(shown)) + shown) if shown else "")
        lines.append(cells)
    head = [
        "bf16: ms on the device / of a call to an idle device",
        "fastformer",
        "eager",
        "FlashAttention-2 on a cache",
    ]
    return table(head, lines)


def precisions(numbers: Numbers) -> str:
    """Makes the table of the quality of smaller precisions."""

    def cells(precision: str) -> Iterator[str]:
        yield precision
        for field, show in (("sacrebleu_test2016", "{:.2f}".format), ("same_tokens", "{:,.0f}".format)):
            for num_beams in (1, 4):
                where = {"op": "translate_precisions", "precision": precision, "num_beams": num_beams}
                yield numbers.value(field, show, **where)
        yield numbers.value("perplexity", "{:.3f}".format, op="score_precisions", precision=precision)

    head = ["BLEU of test2016", "greedy", "4 beams", "lines as in fp32, greedy", "4 beams", "perplexity of a GPT"]
    return table(head, (list(cells(precision)) for precision in ("fp32", "bf16", "int8", "int4")))


def retrieval(numbers: Numbers) -> str:
    """Makes the table of how well an encoder finds sentences in each precision; "" until measured."""
    lines, precisions = [], ("fp32", "bf16", "int8")
    for task in ("two fifths of the words", "typing errors"):
        for measure in ("recall at 1", "recall at 10", "nDCG at 10"):
            where = {"op": "retrieval", "task": task, "measure": measure}
            if numbers.results.find(**where):
                shown = [numbers.value("value", "{:.1f}".format, **where, precision=each) for each in precisions]
                lines.append([f"{task}: {measure}", *shown])
    return table(["all-MiniLM-L6-v2, %", *precisions], lines) if lines else ""


def long_contexts(numbers: Numbers) -> str:
    """Makes the table of long contexts with keys and values in bf16 and in int8; "" until measured."""
    contexts = {int(row["shape"]["context"]) for row in numbers.results.find(op="long_context", precision="int8")}
    lines = []
    for context in sorted(contexts):

        def both(field: str, show: Callable[[float], str], context: int = context) -> list[str]:
            where = {"op": "long_context", "precision": "int8", "context": context}
            return [numbers.value(field, show, provider=f"a cache of {name}", **where) for name in ("bf16", "int8")]

        steps, memory = both("ms_p50", two_digits), both("value", "{:,.0f}".format)
        where = {"op": "long_context", "precision": "int8", "provider": "a cache of int8", "context": context}
        faster = numbers.value("speedup", "{:.2f}".format, **where)
        difference = numbers.value("difference", "{:.3f}".format, **where)
        lines.append([f"{context:,}", *steps, faster, *memory, *both("tokens_s", two_digits), difference])
    head = [
        "tokens", "ms a step, bf16", "int8", "times faster", "MiB, bf16", "int8", "prompt, tokens/s, bf16", "int8",
        "logits differ by",
    ]  # fmt: skip
    return table(head, lines) if lines else ""


def scaling(numbers: Numbers) -> str:
    """Makes the table of fp32 exponents over the length of a sequence; "" until measured."""
    by_group = groups(numbers.results.find(suite="scaling", dtype="float32"))
    if not by_group:
        numbers.missing.append("the growth with the length")
        return ""
    providers = max(by_group.values(), key=lambda x: max(row["time"] for rows in x.values() for row in rows.values()))
    lines = []
    for name, expected in EXPECTED.items():
        try:
            fits = growth(providers.get(name, {}))
        except ValueError:  # too few lengths
            numbers.missing.append(f"the growth of {name}")
            continue
        used = [providers[name][n] for n in fits[0].lengths]
        time, memory = (numbers.shown(f"{x.exponent:.2f}", f"the growth of {name}", used) for x in fits)
        lengths = f"{fits[0].lengths[0]} to {fits[0].lengths[-1]}"
        lines.append([name_of(name), lengths, time, f"{expected.time:g}", memory, f"{expected.memory:g}"])
    return table(["exponents of n, by least squares", "n", "time", "expected", "memory", "expected"], lines)


_measured = functools.partial(times_faster, measured_alone=True)
TABLES: dict[str, Callable[[Numbers], str]] = {
    "summary": functools.partial(summary, HEADLINES),
    **{f"from_{page}": functools.partial(summary, headlines) for page, headlines in COMING_FROM.items()},
    "losses": losses,
    "models": functools.partial(times_faster, MODELS),
    "modules": functools.partial(times_faster, MODULES),
    "small_work": small_work,
    "decoding": functools.partial(beside_engines, PEERS),
    "llama": llama,
    "drafts": functools.partial(times_faster, DRAFTS),
    "constraints": functools.partial(times_faster, CONSTRAINTS),
    "adapters": functools.partial(times_faster, ADAPTERS),
    "embedding": embedding,
    "serving": serving,
    "serving_losses": serving_losses,
    "serving_costs": serving_costs,
    "gpu_attention": gpu_attention,
    "gpu_ops": gpu_ops,
    "precisions": precisions,
    "retrieval": retrieval,
    "long_contexts": long_contexts,
    "processes": processes,
    "preparing": preparing,
    "large_corpus": large_corpus,
    "accelerated": functools.partial(times_faster, DROP_IN),
    "accelerated_int8": functools.partial(beside_engines, ENCODERS_INT8),
    "todays_encoders": functools.partial(times_faster, TODAYS_ENCODERS, measured_alone=True),
    "accelerated_generate": accelerated_generate,
    "accelerated_full_rate": functools.partial(elsewhere, AT_FULL_RATE, functools.partial(_measured, DROP_IN)),
    "ops": functools.partial(times_faster, OPS),
    "avx2": functools.partial(elsewhere, WITHOUT_AVX512, functools.partial(_measured, AVX2)),
    "avx2_decoding": functools.partial(elsewhere, WITHOUT_AVX512, functools.partial(beside_engines, AVX2_PEERS)),
    "amx_encoders": functools.partial(elsewhere, WITH_AMX, functools.partial(_measured, TODAYS_ENCODERS)),
    "amx_models": functools.partial(elsewhere, WITH_AMX, functools.partial(_measured, DROP_IN)),
    "amx_models_int8": functools.partial(elsewhere, WITH_AMX, functools.partial(_measured, ENCODERS_INT8)),
    "amx_decoding": functools.partial(elsewhere, WITH_AMX, functools.partial(beside_engines, AMX_PEERS)),
    "amx_llama": functools.partial(elsewhere, WITH_AMX, llama),
    "amx_drafts": functools.partial(elsewhere, WITH_AMX, functools.partial(_measured, TRAINED_DRAFTS)),
    "amx_adapters": functools.partial(elsewhere, WITH_AMX, functools.partial(_measured, ADAPTERS)),
    "amx_speech": functools.partial(elsewhere, WITH_AMX, functools.partial(summary, COMING_FROM["faster_whisper"])),
    "scaling": scaling,
}


def tables_of(results: Results) -> str:
    """Makes the tables for the lines of your own runs; "" if no table has a line."""
    numbers = Numbers(results)
    tables = [*(_measured(cases, numbers) for cases in (MODELS, MODULES, OPS)), small_work(numbers)]
    return "\n\n".join(text for text in tables if text)
