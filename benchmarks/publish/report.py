"""Makes one page of all results: tables, pictures, losses, experiments. The page is self-contained.

    python -m benchmarks.report [--results DIR] [--out build/report.html]

The page has the latest run of each case (`benchmarks.publish.latest`), and adapts to light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.experiment import last_run, load
from benchmarks.measure import record
from benchmarks.measure.case import SUITES
from benchmarks.measure.commands import parser_of
from benchmarks.measure.console import does_same_work, doubt
from benchmarks.publish.charts import charts, name_of
from benchmarks.publish.latest import RESULTS, Results, Row, case_of, grouped, was_timed
from benchmarks.publish.style import svg, two_digits
from benchmarks.publish.summary import is_ours

OUT = record.ROOT / "build" / "report.html"
_PICTURES = {
    "ops": ("ops",),
    "modules": ("modules",),
    "model": ("models", "drop_in"),
    "decoding": ("peers", "decoding_ladder", "decoding_throughput", "token_times"),
    "scaling": ("scaling",),
}
_DISTURBED = 0.2  # the least share of disturbed turns that is marked
_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --page: #ffffff; --line: #d0d7de; --ours: #b34f00 }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dee4; --page: #0d1117; --line: #30363d; --ours: #f0883e } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1100px;
       margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .6em 0 1.4em }
th, td { padding: .2em .7em; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th:first-child, td:first-child, table.text * { text-align: left }
tr.case td { font-weight: 600; padding-top: .8em }
tr.ours td:first-child { color: var(--ours); font-weight: 600 }
svg { max-width: 100%; height: auto; margin: 1em 0 }
summary { cursor: pointer; font-size: 1.1em; font-weight: 600; margin-top: 1em }
"""
_HEAD = ("provider", "times faster", "ms, median", "20 % to 80 %", "tokens/s", "rate", "roofline", "peak MiB", "ran on",
         "turns")  # fmt: skip


def page(results: Results) -> str:
    """Returns the whole page."""
    parts = [f"<h1>fastformer: what was measured</h1>{_machines(results.rows)}", _losses(results)]
    for suite in SUITES:
        rows = [row for row in results.rows if row.get("suite") == suite]
        pictures = "".join(_picture(name, results) for name in _PICTURES.get(suite, ()))
        if suite != "experiments" and (rows or pictures):
            tables = "".join(_op(op, op_rows) for op, op_rows in grouped(rows, lambda row: row["op"]).items())
            parts.append(f'<h2 id="{suite}">{suite}</h2>{pictures}{tables}')
    parts += [_experiments(results), _commands(results)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fastformer: what was measured</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(head: Iterable[str], lines: Iterable[str], kind: str = "") -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _line(cells: Iterable[object], kind: str = "") -> str:
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _machines(rows: Iterable[Row]) -> str:
    """Formats each machine with its software, and the commits that ran there, with their last day."""
    fields = ("device", "capability", "cores", "torch", "triton", "python")
    machines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        commits = machines.setdefault(tuple(str(row.get(field) or "") for field in fields), {})
        name = str(row.get("commit", "")) + (" with changes" if row.get("dirty") else "")
        commits[name] = max((row.get("time") or "")[:10], commits.get(name, ""))
    if not machines:
        return "<p>Nothing was measured: no file of results has a line.</p>"
    lines = (
        _line([*machine, ", ".join(f"{name} ({day})" for name, day in sorted(commits.items(), key=lambda c: c[1]))])
        for machine, commits in machines.items()
    )
    return _table([*fields, "commits"], lines, "text")


def _picture(name: str, results: Results) -> str:
    """Returns a picture as inline SVG, without ids and metadata, which would be duplicates on one page."""
    chart = charts()[name]
    rows = chart.select(results)
    if not rows:
        return f"<p>No picture {escape(name)}: its rows come from <code>{escape(chart.command)}</code>.</p>"
    text = svg(chart.draw(rows), rows)
    return re.sub(r'<g id="[^"]*">', "<g>", re.sub(r"<metadata>.*?</metadata>\n", "", text[text.index("<svg") :]))


def _op(op: str, rows: list[Row]) -> str:
    """Formats all cases of an op as one table, and its missing providers; lines without a time are not shown."""
    lines = []
    for same in grouped(filter(was_timed, rows), case_of).values():
        lines.append(f'<tr class="case"><td colspan="{len(_HEAD)}">{escape(_title(same[0]))}</td></tr>')
        lines += [_line(_cells(row), "ours" * (is_ours(row["provider"]) and row["provider"] != "read")) for row in same]
    absent = dict.fromkeys(f"{name_of(row['provider'])}: {row['missing']}" for row in rows if "missing" in row)
    if not lines and not absent:
        return ""
    missing = "".join(f"<li>{escape(line)}</li>" for line in absent)
    return (
        f"<details open><summary>{escape(op)}</summary>{_table(_HEAD, lines) if lines else ''}"
        + (f"<p>Not there:</p><ul>{missing}</ul>" if missing else "")
        + "</details>"
    )


def _title(row: Row) -> str:
    """Formats the title of a case."""
    words = [row.get(field) for field in ("model", "mode", "dtype", "data")]
    words += [f"{name} {value}" for name, value in row.get("shape", {}).items()]
    if row.get("threads") and row.get("op") != "peers":
        words.append(f"threads {row['threads']}")
    return ", ".join(str(word) for word in words if word not in (None, ""))


def _name(row: Row) -> str:
    return " ".join(str(part) for part in (row["provider"], row.get("precision")) if part)


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


def _cells(row: Row) -> Iterator[str]:
    """Yields the cells of one provider of a case, for `_HEAD`; "" if a line has no value."""
    yield _name(row)
    yield "" if row.get("speedup") is None else two_digits(row["speedup"])
    yield "" if row.get("ms_p50") is None else _short(row["ms_p50"])
    yield "" if row.get("ms_p20") is None else f"{_short(row['ms_p20'])} to {_short(row['ms_p80'])}"
    yield f"{row['tokens_s']:,.0f}" if row.get("tokens_s") else ""
    if row.get("tflop_s"):
        yield f"{1e3 * row['tflop_s']:,.0f} GFLOP/s"
    else:
        yield f"{row['gb_s']:.1f} GB/s" if row.get("gb_s") else ""
    bound = f" of {row['bound']}" if row.get("bound") else ""
    yield "" if row.get("share") is None else f"{100 * row['share']:.0f} %{bound}"
    yield "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}"
    yield ", ".join(sorted(set((row.get("backends") or {}).values())))
    turns, disturbed = str(row.get("rounds", "")), row.get("disturbed") or 0.0
    why = doubt(row) or (f"{100 * disturbed:.0f} % disturbed" if disturbed >= _DISTURBED else "")
    yield f"{turns} {why}".strip()


def slower(results: Results) -> Iterator[tuple[float, Row, Row]]:
    """Yields (ratio, fastformer, rival) for each comparison that fastformer loses, in one format and one run."""
    compared = (row for row in results.rows if was_timed(row) and does_same_work(row))
    for rows in grouped(compared, case_of).values():
        for ours in (row for row in rows if row["provider"] in ("fastformer", "accelerated")):
            for rival in rows:
                if is_ours(rival["provider"]) or rival.get("precision") != ours.get("precision"):
                    continue
                our_seconds, rival_seconds = record.seconds(ours), record.seconds(rival)
                assert our_seconds and rival_seconds
                ratio = rival.get("ours") if ours["provider"] == "fastformer" else None
                ratio = rival_seconds / our_seconds if ratio is None else float(ratio)
                if ratio < 0.995:
                    yield ratio, ours, rival


def _losses(results: Results) -> str:
    """Formats the comparisons that fastformer loses, worst first."""
    lines = [
        _line([f"{ours['op']}: {_title(ours)}", _name(ours), two_digits(ratio), name_of(rival["provider"])])
        for ratio, ours, rival in sorted(slower(results), key=lambda loss: loss[0])
    ]
    body = _table(("case", "fastformer", "relative speed", "compared with"), lines) if lines else "<p>Nowhere.</p>"
    return f'<h2 id="losses">Where fastformer is slower</h2>{body}'


def _experiments(results: Results) -> str:
    """Formats claims, verdicts and pictures."""
    parts = ['<h2 id="experiments">What the sources say, tried</h2>']
    for name, about in EXPERIMENTS.items():
        rows = last_run(results.find(suite="experiments"), name)
        parts.append(f"<h3>{escape(about)}</h3>")
        if not rows:
            parts.append(f"<p>Not measured: <code>python -m benchmarks.experiments.{escape(name)}</code></p>")
            continue
        parts.append(f"<p>The sources: {escape(load(name).claim)}</p><p><b>{escape(rows[0]['verdict'])}</b></p>")
        parts.append(_picture(f"experiment_{name}", results))
    return "".join(parts)


def _commands(results: Results) -> str:
    """Formats each command with the work that it measured."""
    lines = [
        _line([command, ", ".join(dict.fromkeys(str(row.get("op")) for row in rows)), rows[-1].get("commit", ""),
               rows[-1].get("time") or ""])
        for command, rows in grouped(results.rows, lambda row: row.get("command")).items()
    ]  # fmt: skip
    table = _table(("command", "measured", "commit", "time"), lines, "text")
    return f'<h2 id="commands">Commands</h2>{table}' if lines else ""


def main(arguments: list[str] | None = None) -> int:
    """Writes the page."""
    parser = parser_of("report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of JSON lines")
    parser.add_argument("--out", type=Path, default=OUT, help="the page")
    options = parser.parse_args(arguments)
    try:
        text = page(Results(options.results))
    except ValueError as error:
        parser.error(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0
