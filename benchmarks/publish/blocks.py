"""What stands in README's blocks: `BLOCKS` has a function for each, which writes Markdown out of cells.

A cell is a field of one line, or the ratio of two lines of one run; the block ends with the commands that gave them.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases.models.bench_scaling import EXPECTED
from benchmarks.measure.scaling_fits import causal_over_full, groups, growth
from benchmarks.publish.charts import charts, name_of
from benchmarks.publish.latest import AT_FULL_RATE, WITHOUT_AVX512, Results, Row, value_of
from benchmarks.publish.style import two_digits
from benchmarks.publish.summary import (
    AVX2,
    AVX2_PEERS,
    DROP_IN,
    MODELS,
    MODULES,
    OPS,
    PEERS,
    SMALL_WORK,
    Case,
    Comparison,
    size_of,
)

NOT_MEASURED = "not measured"


class Figure(NamedTuple):
    """One that README shows."""

    text: str
    what: str
    origin: str  # files and lines
    command: str


class Numbers:
    """The results, as text, with a record of what was taken.

    Attributes:
        results: where from.
        figures: each that was shown.
        missing: what was asked for and isn't there.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.figures: list[Figure] = []
        self.missing: list[str] = []
        self._said = 0  # figures whose commands are written

    def value(self, field: str, show: Callable[[float], str] = two_digits, /, **where: Any) -> str:
        """A field of the one line that has these fields, in the latest run that has such lines.

        Raises:
            ValueError: several lines of that run do.
        """
        rows = self.results.find(**where)
        latest = max((row.get("time") or "" for row in rows), default="")
        rows = [row for row in rows if (row.get("time") or "") == latest]
        if len(rows) > 1:
            origins = ", ".join(self.results.origin(row) for row in rows)
            raise ValueError(f"expected one line with {where}, got {origins}")
        found = value_of(rows[0], field) if rows else None
        if not isinstance(found, (int, float)):
            return self._missing(f"{field} of {where}")
        return self.shown(show(found), f"{field} of {where}", rows)

    def _found(self, case: Case, panel: str, against: str) -> Comparison | None:
        found = case.comparisons(self.results.rows)
        return next((each for each in found if (each.panel, each.against) == (panel, against)), None)

    def ratio(self, case: Case, panel: str, against: str) -> str:
        """How many times faster ours is."""
        what = f"{case.label}, {panel}, against {against}"
        found = self._found(case, panel, against)
        if found is None:
            return self._missing(what)
        return self.shown(two_digits(found.ratio) + "~" * found.is_unsteady, what, [found.ours, found.rival])

    def milliseconds(self, case: Case, panel: str, against: str) -> tuple[str, str]:
        """What a call takes the other, and what it takes ours: medians of the two lines that the ratio is made of."""
        what = f"{case.label}, {panel}, milliseconds"
        found = self._found(case, panel, against)
        if found is None:
            return self._missing(what), self._missing(what)
        return (
            self.shown(two_digits(found.rival["ms_p50"]), f"{what} of {against}", [found.rival]),
            self.shown(two_digits(found.ours["ms_p50"]), f"{what} of ours", [found.ours]),
        )

    def shown(self, text: str, what: str, rows: Iterable[Row]) -> str:
        """The text, noted down as made of these rows."""
        rows = list(rows)
        origin = ", ".join(self.results.origin(row) for row in rows)
        self.figures.append(
            Figure(text, what, origin, "; ".join(dict.fromkeys(str(row.get("command")) for row in rows)))
        )
        return text

    def _missing(self, what: str) -> str:
        self.missing.append(what)
        return NOT_MEASURED

    def commands(self) -> str:
        """Those of all figures since the last call, without where they write."""
        taken = self.figures[self._said :]
        self._said = len(self.figures)
        found = [re.sub(r" --out \S+| --publish", "", figure.command) for figure in taken]
        commands = dict.fromkeys(command for each in found for command in each.split("; "))
        return "\n".join(["```", *map(wrapped, commands), "```"]) if commands else ""

    def picture(self, name: str, *, with_commands: bool = False) -> str:
        """The picture, where it can be drawn; with_commands: those of its rows are to be shown as those of a figure."""
        chart = charts()[name]
        rows = chart.select(self.results)
        if with_commands:
            self.shown("", f"the picture {name}", rows)
        if not rows:
            self.missing.append(f"the rows of the picture {name} ({chart.command})")
            return ""
        return f"![{chart.alt}](benchmarks/pictures/{name}.svg)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paragraphs(*parts: str) -> str:
    """Those that aren't empty, with a line between."""
    return "\n\n".join(part for part in parts if part)


def prose(text: str) -> str:
    """In lines that fit."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def wrapped(command: str) -> str:
    """A command over several lines, broken before an option."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) > 116:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def times_faster(numbers: Numbers, cases: Sequence[Case], what: str, *, measured_alone: bool = False) -> str:
    """A table: a line for each case, a column for each rival; fp32 and bf16 in a cell, as `2.2 · 3.5`.

    measured_alone: without what was not measured, rather than with words that say so.
    """
    results = numbers.results.rows
    measured = [list(case.comparisons(results)) for case in cases]
    rivals = dict.fromkeys(rival for case in cases for rival in case.rivals(results))
    if measured_alone:
        there = {found.against for each in measured for found in each}
        rivals = dict.fromkeys(rival for rival in rivals if rival in there)
    rows = []
    for case, comparisons in zip(cases, measured, strict=True):
        if measured_alone and not comparisons:
            continue
        cells = []
        for rival in rivals:
            panels = {found.panel for found in comparisons if found.against == rival}
            if rival in case.against and not measured_alone:
                panels.update(panel.name for panel in case.panels)
            in_order = (panel.name for panel in case.panels if panel.name in panels)
            cells.append(" · ".join(numbers.ratio(case, panel, rival) for panel in in_order))
        rows.append([case.label, *cells])
    return table([what, *map(name_of, rivals)], rows)


def tables_of(results: Results) -> str:
    """README's tables out of the lines of a run of one's own, as far as they have them; "" where they have none."""
    numbers = Numbers(results)
    tables = []
    for cases in (MODELS, MODULES, OPS):
        panels = dict.fromkeys(found.panel for case in cases for found in case.comparisons(results.rows))
        if panels:
            what = f"times faster, {' · '.join(panels)}, than"
            tables.append(times_faster(numbers, cases, what, measured_alone=True))
    return paragraphs(*tables)


def machine(numbers: Numbers) -> str:
    """On what."""
    rows = [row for row in numbers.results.rows if row.get("device") and row.get("threads")]

    def all_of(field: str, between: str = ", ") -> str:
        return between.join(sorted({str(row[field]) for row in rows if row.get(field) is not None}))

    return prose(
        f"Measured on: {all_of('device', '; ')} ({all_of('capability')}), {all_of('cores')} cores, "
        f"PyTorch {all_of('torch')}, Triton {all_of('triton')}, Python {all_of('python')}."
    )


def first(numbers: Numbers) -> str:
    """The first example: a model that exists, before and after."""
    case = _case(DROP_IN, "BERT-base, 8 sequences of 32 to 128 tokens")
    before, after = numbers.milliseconds(case, "fp32", "as it is")
    code = f"""\
        ```python
        import fastformer, transformers

        model = transformers.BertModel.from_pretrained("bert-base-uncased").eval()
        model(**batch)  # before: {before} ms
        fastformer.accelerate(model)
        print(fastformer.report(model))  # swapped: 1 BertModel, 1 BertEncoder, 12 BertLayer, ...
        model(**batch)  # after: {after} ms
        ```"""
    shape = case.label.partition(", ")[2]
    where = f"`batch` is {shape}, in fp32, under `torch.inference_mode()` on a CPU (see [Numbers](#numbers))."
    return paragraphs(textwrap.dedent(code), prose(f"{where} `fastformer.restore(model)` undoes it."))


def summary(numbers: Numbers) -> str:
    """What a newcomer wants to know."""
    rows = []
    for case, against, panels in SUMMARY:
        figures = ", ".join(f"{numbers.ratio(case, panel, against)} ({panel})" for panel in panels)
        rows.append([case.label, figures, name_of(against)])
    return paragraphs(table(["", "times faster", "than"], rows), *(map(numbers.picture, ("models", "ops", "peers"))))


def _case(cases: Sequence[Case], label: str) -> Case:
    (found,) = [case for case in cases if case.label == label]
    return found


SUMMARY = (
    (_case(MODELS, "training step of base, 64 sentences of mixed length"), "baseline", ("fp32", "bf16")),
    (_case(MODELS, "training step of base, 64 sentences of mixed length"), "torch.compile", ("fp32", "bf16")),
    (_case(DROP_IN, "BERT-base, 8 sequences of 32 to 128 tokens"), "as it is", ("fp32", "bf16")),
    (_case(OPS, "causal attention (2, 8, 2048, 64), training"), "sdpa", ("fp32", "bf16")),
    (_case(PEERS, "base, greedy, 1 source"), "ctranslate2", ("int8", "fp32")),
    (_case(PEERS, "GPT-2's small shape, one prompt"), "llama.cpp", ("int8",)),
)


def models(numbers: Numbers) -> str:
    """Training steps."""
    return paragraphs(times_faster(numbers, MODELS, "times faster, fp32 · bf16, than"), numbers.commands())


def modules(numbers: Numbers) -> str:
    """Against torch.nn's."""
    if not MODULES:
        return ""
    return paragraphs(
        times_faster(numbers, MODULES, "times faster, fp32 · bf16, than"),
        numbers.picture("modules"),
        numbers.commands(),
    )


def small_work(numbers: Numbers) -> str:
    """Encoders so small that a call's own cost counts; "" until they were measured."""
    lines = []
    for size, columns in SMALL_WORK.items():
        if any(list(case.comparisons(numbers.results.rows)) for cases in columns.values() for case in cases):
            cells = [
                " · ".join(numbers.ratio(case, "fp32", "torch.nn") for case in cases) for cases in columns.values()
            ]
            lines.append([size_of(size), *cells])
    if not lines:
        return ""
    learns = {False: "evaluation", True: "training"}
    names = {"fastformer": "fastformer.nn"}
    head = [f"{learns[is_step]}, {names.get(ours, ours)}" for is_step, ours in next(iter(SMALL_WORK.values()))]
    return paragraphs(table(["of torch.nn's speed, 1 · 2 threads", *head], lines), numbers.commands())


def ops(numbers: Numbers) -> str:
    """Single ops, and the memory of the one that saves most."""
    where = {"op": "linear_cross_entropy", "mode": "fwdbwd", "vocab_size": 32000}
    ours, plain, half = (
        numbers.value("peak_mib", provider=provider, dtype=dtype, **where)
        for provider, dtype in (("fastformer", "float32"), ("eager", "float32"), ("fastformer", "bfloat16"))
    )
    memory = prose(
        f"linear_cross_entropy of (4096, 512) and 32,000 tokens takes {ours} MiB (bf16: {half}) beside its inputs, "
        f"gradients included, where eager takes {plain}."
    )
    return paragraphs(times_faster(numbers, OPS, "times faster, fp32 · bf16, than"), memory, numbers.commands())


def accelerated(numbers: Numbers) -> str:
    """Models of transformers."""
    return paragraphs(
        times_faster(numbers, DROP_IN, "times faster, fp32 · bf16, than"),
        _others_in_int8(numbers),
        _at_full_rate(numbers),
        numbers.picture("drop_in"),
        numbers.commands(),
    )


def _at_full_rate(numbers: Numbers) -> str:
    """The same where PyTorch's own products are as fast as the CPU."""
    lacking = "lines of a CPU where PyTorch's products have its whole rate"
    with _elsewhere(numbers, AT_FULL_RATE, lacking) as (own, where):
        if not where:
            return ""
        text = f"On {where}, where PyTorch's own products in fp32 have the CPU's whole rate, less is left to gain:"
        measured = times_faster(own, DROP_IN, "times faster, fp32 · bf16, than", measured_alone=True)
    return paragraphs(prose(text), measured)


@contextlib.contextmanager
def _elsewhere(numbers: Numbers, kind: str, what: str) -> Iterator[tuple[Numbers, str]]:
    """The lines that stand apart, and the machines that they are of, "" where there are none; what is taken of them
    counts among the block's figures."""
    own = Numbers(Results(numbers.results.folder, kind=kind))
    if not own.results.rows:
        own.missing.append(what)
    yield own, "; ".join(sorted({f"{row['device']}, {row['cores']} cores" for row in own.results.rows}))
    numbers.figures += own.figures
    numbers.missing += own.missing


def _others_in_int8(numbers: Numbers) -> str:
    """What runtimes make of a model in int8, which ours has for decoding alone."""
    found = [
        (name_of(provider), [
            numbers.value("speedup", op="drop_in", model="bert_base", seqlen=seqlen, provider=provider, dtype="int8")
            for seqlen in ("32 to 128", "512")
        ])
        for provider in ("openvino", "onnxruntime")
    ]  # fmt: skip
    (first, of_first), (second, of_second) = found
    return prose(
        f"In int8, which ours has for decoding alone, {first} runs BERT-base {of_first[0]} and {of_first[1]} times as "
        f"fast as it is in fp32 (32 to 128, and 512 tokens), {second} {of_second[0]} and {of_second[1]} times."
    )


_TRAINED_BASE = """fastformer train base4 --train_source train.en --train_target train.de --val_source val.en \\
    --val_target val.de --vocab_size 6000 --preset base --model.dropout 0.1 --label_smoothing 0.1 --steps 320 \\
    --lr 1e-3 --warmup 80 --precision bf16 --val_every 160 --save_every 80"""
_DECODING_PICTURES = ("decoding_ladder", "decoding_throughput", "token_times")


def _beside_engines(numbers: Numbers, cases: Sequence[Case]) -> str:
    """A table: a line for each case and engine, a column for each precision."""
    rows = []
    names = [panel.name for panel in cases[0].panels]
    for case in cases:
        for rival in case.rivals(numbers.results.rows):
            measured = {found.panel for found in case.comparisons(numbers.results.rows) if found.against == rival}
            wanted = measured | ({panel.name for panel in case.panels} if rival in case.against else set())
            if wanted:
                cells = [numbers.ratio(case, name, rival) if name in wanted else "" for name in names]
                rows.append([case.label, *cells, name_of(rival)])
    return table(["times faster", *names, "than"], rows)


def decoding(numbers: Numbers) -> str:
    """Beside other engines, and step by step."""
    engines = _beside_engines(numbers, PEERS)
    greedy = {"op": "peers", "model": "base", "batch": 1, "num_beams": 1, "provider": "fastformer", "precision": "int8"}
    share = numbers.value("share_of_cached", lambda share: f"{100 * share:.0f} %", **greedy)
    beside = {"op": "peers_neighbours", "model": "base", "num_beams": 1, "threads": 2, "neighbours": 2}
    kept = [numbers.value("speedup", lambda kept: f"{100 * kept:.0f} %", **beside, batch=batch) for batch in (1, 16)]
    read = prose(
        f"With one source, int8 takes its weights at {share} of the speed at which as many bytes are merely read, "
        f"again and again. Beside two busy processes on the same two cores, which leave it half of them, "
        f"two threads keep {kept[0]} of their speed, with 16 sources {kept[1]}. The "
        "trained base (6 + 6 layers) learned Multi30k by the first command below."
    )
    trained = "```\n" + _TRAINED_BASE + "\n```"
    return paragraphs(
        engines, read, trained, numbers.commands(),
        *(numbers.picture(name, with_commands=True) for name in _DECODING_PICTURES), numbers.commands(),
    )  # fmt: skip


def avx2(numbers: Numbers) -> str:
    """On CPUs without AVX-512."""
    with _elsewhere(numbers, WITHOUT_AVX512, "lines of a CPU without AVX-512") as (own, where):
        if not where:
            return ""
        text = (
            f"On {where}. Vectors are half as wide, int8 has no products of its own, and for bf16 PyTorch has plain "
            "loops, ours the rate of fp32."
        )
        measured = times_faster(own, AVX2, "times faster, fp32 · bf16, than", measured_alone=True)
        tables = (measured, _beside_engines(own, AVX2_PEERS))
    return paragraphs("### Without AVX-512", prose(text), *tables, numbers.commands())


def scaling(numbers: Numbers) -> str:
    """Over the length of a sequence: exponents in fp32, and the picture."""
    picture = numbers.picture("scaling")
    if not picture:
        return ""
    found = groups(numbers.results.find(suite="scaling", dtype="float32"))
    providers = max(
        found.values(), key=lambda each: max(row["time"] for rows in each.values() for row in rows.values())
    )
    lines = []
    for name, expected in EXPECTED.items():
        try:
            fits = growth(providers.get(name, {}))
        except ValueError:  # too few lengths
            numbers.missing.append(f"the growth of {name}")
            continue
        used = [providers[name][n] for n in fits[0].lengths]
        time, memory = (numbers.shown(f"{each.exponent:.2f}", f"the growth of {name}", used) for each in fits)
        lengths = f"{fits[0].lengths[0]} to {fits[0].lengths[-1]}"
        lines.append([name_of(name), lengths, time, f"{expected.time:g}", memory, f"{expected.memory:g}"])
    head = ["exponents of n, by least squares", "n", "time", "expected", "memory", "expected"]
    triangle = ""
    if (share := causal_over_full(providers)) is not None:
        used = [providers[name][share[0]] for name in ("fastformer", "fastformer causal")]
        part = numbers.shown(f"{share[1]:.2f}", "causal over full", used)
        triangle = f"At n = {share[0]:,} causal attention takes {part} of the time of the full one."
    return paragraphs("### Growth with the length", table(head, lines), triangle, picture, numbers.commands())


def full_batch(numbers: Numbers) -> str:
    """Continuous batching."""
    greedy, beams = (
        numbers.value("speedup", op="translate_lines", provider="continuous", num_beams=num_beams)
        for num_beams in (1, 4)
    )
    lines = numbers.value("shape__lines", "{:,.0f}".format, op="translate_lines", provider="continuous", num_beams=1)
    text = (
        f"{lines} lines, greedy, through one batch that is kept full: {greedy} times the tokens a second of batches of "
        f"similar length that run to their end; with 4 beams, which end together anyway, {beams} times."
    )
    return paragraphs(prose(text), numbers.commands())


def precisions(numbers: Numbers) -> str:
    """What the smaller ones cost in quality."""

    def row(precision: str) -> list[str]:
        def of(field: str, show: Callable[[float], str], num_beams: int) -> str:
            return numbers.value(field, show, op="translate_precisions", precision=precision, num_beams=num_beams)

        scores = (of("sacrebleu_test2016", "{:.2f}".format, num_beams) for num_beams in (1, 4))
        same = (of("same_tokens", "{:,.0f}".format, num_beams) for num_beams in (1, 4))
        return [precision, *scores, *same]

    head = ["BLEU of test2016", "greedy", "4 beams", "lines as in fp32, greedy", "4 beams"]
    return paragraphs(table(head, map(row, ("fp32", "bf16", "int8"))), numbers.commands())


def experiments(numbers: Numbers) -> str:
    """What each found, in a sentence, with its picture."""
    from benchmarks.experiments import EXPERIMENTS
    from benchmarks.experiments.experiment import last_run

    rows = []
    for name, about in EXPERIMENTS.items():
        own = last_run(numbers.results.find(suite="experiments"), name)
        if not own:
            numbers.missing.append(f"experiment {name} (python -m benchmarks.experiments.{name})")
            continue
        finding = numbers.shown(own[0]["finding"], f"experiment {name}", own[:1])
        rows.append([f"[{about}](benchmarks/pictures/experiment_{name}.svg)", own[0]["verdict"], finding])
    if not rows:
        return ""
    found = table(["experiment", "the sources' claim", "found"], rows)
    return paragraphs("### What the sources say, tried", found, numbers.commands())


def trained(numbers: Numbers) -> str:
    """Scores of trained models."""

    def score(field: str, decimals: int, **where: Any) -> str:
        return numbers.value(field, lambda value: f"{value:.{decimals}f}", op="train", **where)

    pairs, characters = {"data": "multi30k en-de"}, {"data": "tinyshakespeare, last tenth"}
    words = {"data": "number words"}
    signature = next((row["signature"] for row in numbers.results.find(op="train", **pairs)), NOT_MEASURED)
    bleu, beam_bleu = (score(f"{beam}sacrebleu_test2016", 1, **pairs) for beam in ("", "beam_4__"))
    chrf, beam_chrf = (score(f"{beam}chrf_test2016", 1, **pairs) for beam in ("", "beam_4__"))
    translator = (
        f"A translator, trained on Multi30k as follows, reaches sacreBLEU {bleu} on its test2016, greedy, and "
        f"{beam_bleu} with 4 beams (chrF {chrf} and {beam_chrf}; `{signature}`), by the average of its last five "
        "checkpoints:"
    )
    commands = [numbers.commands()]
    task = (
        f"The built-in task of number words: exact match {score('exact_match', 2, **words)} on "
        f"{score('examples', 0, **words)} texts after {score('seconds', 0, **words)} seconds of training."
    )
    commands.append(numbers.commands())
    language_model = (
        f"A small GPT on the bytes of a megabyte of Shakespeare: {score('nats_per_character', 2, **characters)} nats a "
        "character on the last tenth."
    )
    commands.append(numbers.commands())
    texts = map(prose, (translator, task, language_model))
    return paragraphs(*(part for pair in zip(texts, commands, strict=True) for part in pair))


def losses(numbers: Numbers) -> str:
    """All comparisons of the tables above in which ours is slower."""
    small = [case for columns in SMALL_WORK.values() for cases in columns.values() for case in cases]
    slower: list[Comparison] = [
        found
        for cases in (OPS, MODULES, MODELS, DROP_IN, PEERS, small)
        for case in cases
        for found in case.comparisons(numbers.results.rows)
        if float(two_digits(found.ratio).replace(",", "")) < 1
    ]
    rows = [
        [f"{each.label}, {each.panel}", numbers.shown(two_digits(each.ratio), f"{each.label}, {each.panel}",
                                                      [each.ours, each.rival]), name_of(each.against)]
        for each in sorted(slower, key=lambda each: each.ratio)
    ]  # fmt: skip
    numbers.commands()
    return table(["", "of the speed of", ""], [[a, b, c] for a, b, c in rows]) if rows else "Nowhere in these tables."


BLOCKS: dict[str, Callable[[Numbers], str]] = {
    "first": first,
    "machine": machine,
    "summary": summary,
    "losses": losses,
    "models": models,
    "modules": modules,
    "small_work": small_work,
    "ops": ops,
    "accelerated": accelerated,
    "decoding": decoding,
    "avx2": avx2,
    "scaling": scaling,
    "full_batch": full_batch,
    "precisions": precisions,
    "experiments": experiments,
    "trained": trained,
}
