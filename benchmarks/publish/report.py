"""One page of everything that was measured: tables, pictures, losses, experiments. It needs nothing beside itself.

    python -m benchmarks.report [--results DIR] [--out build/report.html]

The page holds, of each case, its latest run (`benchmarks.publish.latest`), and adapts to light and dark.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.experiment import last_run, load
from benchmarks.measure import record
from benchmarks.measure.case import SUITES
from benchmarks.measure.console import doubt
from benchmarks.publish.charts import charts, name_of
from benchmarks.publish.latest import RESULTS, Results, Row, case_of, was_timed
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
_DISTURBED = 0.2  # a share of disturbed turns that is worth a mark
_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --page: #ffffff; --line: #d0d7de; --soft: #f6f8fa; --ours: #b34f00;
        --warn: #9a6700 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d8dee4; --page: #0d1117; --line: #30363d; --soft: #161b22; --ours: #f0883e; --warn: #d29922 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1100px;
       margin: 2em auto; padding: 0 1em }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .2em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .6em 0 1.4em }
th, td { padding: .2em .7em; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th { background: var(--soft) }
th:first-child, td:first-child, td.text, th.text { text-align: left }
tr.case td { font-weight: 600; padding-top: .8em }
.scroll { overflow-x: auto }
.ours td:first-child { color: var(--ours); font-weight: 600 }
.warn { color: var(--warn) }
.bar { display: inline-block; height: .7em; background: currentColor; opacity: .45; margin-left: .5em }
svg { max-width: 100%; height: auto; margin: 1em 0 }
code { background: var(--soft); padding: .1em .3em; overflow-wrap: anywhere }
summary { cursor: pointer; font-size: 1.1em; font-weight: 600; margin-top: 1em }
"""
_HEAD = (
    ("provider", "text"),
    ("times faster", ""),
    ("ms, median", ""),
    ("20 % to 80 %", ""),
    ("tokens/s", ""),
    ("rate", ""),
    ("roofline", ""),
    ("peak MiB", ""),
    ("ran on", "text"),
    ("turns", "text"),
)


def page(results: Results) -> str:
    """The whole of it."""
    parts = [f"<h1>fastformer: what was measured</h1>{_machines(results.rows)}{_contents(results)}", _losses(results)]
    for suite in SUITES:
        if suite == "experiments":
            continue
        rows = [row for row in results.rows if row.get("suite") == suite]
        pictures = "".join(_picture(name, results) for name in _PICTURES.get(suite, ()))
        if rows or pictures:
            tables = "".join(_op(op, own) for op, own in _by(rows, "op").items())
            parts.append(f'<h2 id="{suite}">{suite}</h2>{pictures}{tables}')
    parts.append(_experiments(results))
    parts.append(_commands(results))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fastformer: what was measured</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _by(rows: Iterable[Row], field: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(field), []).append(row)
    return groups


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(head: Iterable[tuple[str, str]], lines: Iterable[str]) -> str:
    heads = "".join(f'<th class="{kind}">{_text(name)}</th>' for name, kind in head)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def _machines(rows: Iterable[Row]) -> str:
    """Each machine with its software, and the commits that ran there."""
    fields = ("device", "capability", "cores", "torch", "triton", "python")
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        commits = found.setdefault(tuple(_text(row.get(field, "")) for field in fields), {})
        day = (row.get("time") or "")[:10]
        name = _text(row.get("commit", "")) + (" with changes" if row.get("dirty") else "")
        commits[name] = max(day, commits.get(name, ""))
    lines = []
    for machine, commits in found.items():
        shown = ", ".join(
            f"{name} ({day})" if day else name for name, day in sorted(commits.items(), key=lambda c: c[1])
        )
        lines.append("<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in (*machine, shown)) + "</tr>")
    if not lines:
        return "<p>Nothing was measured: no file of results has a line.</p>"
    return _table([(name, "text") for name in (*fields, "commits")], lines)


def _contents(results: Results) -> str:
    suites = [suite for suite in SUITES if any(row.get("suite") == suite for row in results.rows)]
    links = "".join(f'<li><a href="#{suite}">{suite}</a></li>' for suite in suites)
    return (
        f'<ul><li><a href="#losses">where ours is slower</a></li>{links}<li><a href="#commands">commands</a></li></ul>'
    )


def _picture(name: str, results: Results) -> str:
    """Inline, without what would be there twice on one page; nothing where its rows are missing."""
    chart = charts()[name]
    rows = chart.select(results)
    if not rows:
        return f"<p>No picture {_text(name)}: its rows come from <code>{_text(chart.command)}</code>.</p>"
    return _inline(svg(chart.draw(rows), rows))


def _inline(text: str) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\n", "", body)
    return re.sub(r'<g id="[^"]*">', "<g>", body)


def _op(op: str, rows: list[Row]) -> str:
    """All cases of an op as one table; lines that are about no time stand in none."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if was_timed(row) or "missing" in row:
            cases.setdefault(case_of(row), []).append(row)
    lines = []
    for own in cases.values():
        if any(map(was_timed, own)):
            lines.append(f'<tr class="case"><td class="text" colspan="{len(_HEAD)}">{_text(_title(own[0]))}</td></tr>')
            lines += [_line(row, own) for row in own]
    absent = {(row["provider"], row["missing"]): None for row in rows if "missing" in row}  # each once
    missing = "".join(f"<li>{_text(name_of(name))}: {_text(how)}</li>" for name, how in absent)
    if not lines and not missing:
        return ""
    table = _table(_HEAD, lines) if lines else ""
    not_there = f"<p>Not there:</p><ul>{missing}</ul>" if missing else ""
    return f"<details open><summary>{_text(op)}</summary>{table}{not_there}</details>"


def _title(row: Row) -> str:
    """What a case is."""
    words = [row.get(field) for field in ("model", "mode", "dtype", "data")]
    words += [f"{name} {value}" for name, value in row.get("shape", {}).items()]
    threads = row.get("threads")
    if threads and row.get("op") != "peers":
        words.append(f"{threads} thread{'s' * (threads > 1)}")
    return ", ".join(str(word) for word in words if word not in (None, ""))


def _line(row: Row, case: list[Row]) -> str:
    """One provider of a case."""
    name = _name(row)
    ours = " class='ours'" if is_ours(row["provider"]) and row["provider"] != "read" else ""
    if "missing" in row:
        why = f'<td class="text" colspan="{len(_HEAD) - 1}">{_text(row["missing"])}</td>'
        return f'<tr{ours}><td class="text">{_text(name)}</td>{why}</tr>'
    most = max((other.get("speedup") or 0 for other in case), default=0) or 1
    speedup, spread = row.get("speedup"), ""
    if row.get("ms_p20") is not None:
        spread = f"{_short(row['ms_p20'])} to {_short(row['ms_p80'])}"
    cells = [
        ""
        if speedup is None
        else f'{two_digits(speedup)}<span class="bar" style="width:{60 * speedup / most:.0f}px"></span>',
        _short(row.get("ms_p50")),
        spread,
        "" if not row.get("tokens_s") else f"{row['tokens_s']:,.0f}",
        _rate(row),
        _roofline(row),
        "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}",
    ]
    backends = ", ".join(sorted(set((row.get("backends") or {}).values())))
    right = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr{ours}><td class="text">{_text(name)}</td>{right}<td class="text">{_text(backends)}</td>'
        f'<td class="text">{_turns(row)}</td></tr>'
    )


def _name(row: Row) -> str:
    return " ".join(str(part) for part in (row["provider"], row.get("precision")) if part)


def _short(ms: float | None) -> str:
    return "" if ms is None else f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


def _rate(row: Mapping[str, Any]) -> str:
    if row.get("tflop_s"):
        return f"{1e3 * row['tflop_s']:,.0f} GFLOP/s"
    return f"{row['gb_s']:.1f} GB/s" if row.get("gb_s") else ""


def _roofline(row: Mapping[str, Any]) -> str:
    """The share of what the machine can do, and what bounds it."""
    share = row.get("share")
    if share is None and row.get("floor_ms") and row.get("ms_p50"):
        share = row["floor_ms"] / row["ms_p50"]
    return "" if share is None else f"{100 * share:.0f} %" + (f" of {row['bound']}" if row.get("bound") else "")


def _turns(row: Mapping[str, Any]) -> str:
    """How many, and whether something else was at work."""
    rounds, disturbed = row.get("rounds"), row.get("disturbed")
    text = "" if rounds is None else str(rounds)
    if (why := doubt(row)) is not None:
        text += f' <span class="warn">{why}</span>'
    elif disturbed is not None and disturbed >= _DISTURBED:
        text += f' <span class="warn">{100 * disturbed:.0f} % disturbed</span>'
    return text


def slower(results: Results) -> Iterator[tuple[float, Row, Row]]:
    """(ratio, ours, rival) of each comparison in which ours takes longer, in the same format and the same run."""
    cases: dict[str, list[Row]] = {}
    for row in filter(was_timed, results.rows):
        if row.get("suite") != "scaling":  # there providers do different things
            cases.setdefault(case_of(row), []).append(row)
    for rows in cases.values():
        for ours in rows:
            if ours["provider"] not in ("fastformer", "accelerated"):
                continue
            for rival in rows:
                if is_ours(rival["provider"]) or rival.get("precision") != ours.get("precision"):
                    continue
                mine, theirs = record.seconds(ours), record.seconds(rival)
                assert mine and theirs
                ratio = rival.get("ours") if ours["provider"] == "fastformer" else None
                ratio = theirs / mine if ratio is None else float(ratio)
                if ratio < 0.995:
                    yield ratio, ours, rival


def _losses(results: Results) -> str:
    """Where ours is slower, worst first."""
    lines = [
        f'<tr><td class="text">{_text(ours["op"])}: {_text(_title(ours))}</td>'
        f'<td class="text">{_text(_name(ours))}</td>'
        f'<td>{two_digits(ratio)}</td><td class="text">{_text(name_of(rival["provider"]))}</td></tr>'
        for ratio, ours, rival in sorted(slower(results), key=lambda each: each[0])
    ]
    head = (("case", "text"), ("ours", "text"), ("of the speed of", ""), ("", "text"))
    body = _table(head, lines) if lines else "<p>Nowhere.</p>"
    return f'<h2 id="losses">Where ours is slower</h2>{body}'


def _experiments(results: Results) -> str:
    """Claims, findings and pictures."""
    parts = []
    for name, about in EXPERIMENTS.items():
        rows = last_run(results.find(suite="experiments"), name)
        parts.append(f"<h3>{_text(about)}</h3>")
        if not rows:
            parts.append(f"<p>Not measured: <code>python -m benchmarks.experiments.{_text(name)}</code></p>")
            continue
        parts.append(
            f"<p>The sources: {_text(load(name).claim)}</p><p><b>{_text(rows[0]['verdict'])}</b>: "
            f"{_text(rows[0]['finding'])}</p>{_picture(f'experiment_{name}', results)}"
        )
    return f'<h2 id="experiments">What the sources say, tried</h2>{"".join(parts)}'


def _commands(results: Results) -> str:
    """Each command with what it measured."""
    lines = []
    for command, rows in _by(results.rows, "command").items():
        ops = ", ".join(dict.fromkeys(str(row.get("op")) for row in rows))
        cells = (
            f"<code>{_text(command)}</code>",
            _text(ops),
            _text(rows[-1].get("commit", "")),
            _text(rows[-1].get("time") or ""),
        )
        lines.append("<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in cells) + "</tr>")
    head = [(name, "text") for name in ("command", "measured", "commit", "time")]
    return f'<h2 id="commands">Commands</h2>{_table(head, lines)}' if lines else ""


def main(arguments: list[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
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
