#!/usr/bin/env python3
"""Draws bench-llama.svg from bench-llama.json and puts its table into bench-llama.md, all in one folder.

    benches/llama/plot.py docs
"""

import json
import math
import pathlib
import sys
from html import escape

WIDTH, BAR, STEP, HEAD = 860, 10, 15, 26
COLUMN, LABEL, VALUE = 420, 130, 46  # of each column: its width, its labels, its figures
BEGIN, END = "<!-- made by benches/llama/plot.py -->", "<!-- end -->"

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.head { font-weight: 600 }
.value { font-variant-numeric: tabular-nums }
.page { fill: #ffffff } .one { stroke: #1f2328 } .tick { stroke: #d1d9e0 }
.faster { fill: #0969da } .slower { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .page { fill: #0d1117 } .one { stroke: #f0f6fc } .tick { stroke: #3d444d }
  .faster { fill: #4493f8 } .slower { fill: #db6d28 }
}
"""

SHORT = {
    "seq_rm, all of a sequence": "seq_rm",
    "seq_rm, its last 64 positions": "seq_rm, last 64",
    "seq_cp, all of a sequence": "seq_cp",
    "seq_add, all of a sequence": "seq_add",
    "slot search, 512 cells behind the used ones": "slots, 512",
    "slot search, the next cell": "slot, the next",
}


def drawn(row):
    """Not the call that does different work: a partial checkpoint."""
    return "PARTIAL" not in row["call"]


def by_group(rows):
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def figure(number):
    return f"{number:.2f}" if number < 10 else f"{number:,.0f}"


def column(x, groups, decades):
    """One column of groups of bars; returns its SVG and its height."""
    low, high = decades
    scale = (COLUMN - LABEL - VALUE) / (high - low)

    def at(ratio):
        return x + LABEL + (min(max(math.log10(ratio), low), high) - low) * scale

    ticks = range(math.ceil(low), math.floor(high) + 1)
    y = 76
    bars = [f'<text x="{at(10.0**tick):.1f}" y="64" text-anchor="middle">{10.0**tick:g}</text>' for tick in ticks]
    for group, rows in groups.items():
        bars.append(f'<text class="head" x="{x}" y="{y + 12}">{escape(group)}</text>')
        y += HEAD - 6
        for tick in ticks:
            place = f'x1="{at(10.0**tick):.1f}" x2="{at(10.0**tick):.1f}" y1="{y - 3}" y2="{y + STEP * len(rows) - 2}"'
            bars.append(f'<line class="{"tick" if tick else "one"}" {place}/>')
        for row in rows:
            ratio = row["ratio"]["median"]
            label = SHORT.get(row["call"], row["call"]) + (", synced" if row["note"] else "")
            left, right = sorted((at(1), at(ratio)))
            kind = "faster" if ratio >= 1 else "slower"
            bars.append(
                f'<text x="{x + LABEL - 8}" y="{y + 10}" text-anchor="end">{escape(label)}</text>'
                f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" height="{BAR}"/>'
                f'<text class="value" x="{max(right, at(1)) + 5:.1f}" y="{y + 10}">{figure(ratio)}</text>'
            )
            y += STEP
        y += HEAD - STEP
    return "".join(bars), y


def svg(report):
    rows = [row for row in report["rows"] if drawn(row)]
    logs = [math.log10(row["ratio"]["median"]) for row in rows]
    decades = min(-0.3, min(logs)), max(logs) + 0.05
    state, state_end = column(16, by_group(row for row in rows if row["bytes"]), decades)
    memory, memory_end = column(16 + COLUMN + 8, by_group(row for row in rows if not row["bytes"]), decades)
    height = max(state_end, memory_end)
    title = "Times as fast as llama.cpp: its time / kvstate's, log scale"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
        f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
        f'<text class="title" x="16" y="30">{title}</text>'
        f"{state}{memory}</svg>\n"
    )


def time(seconds):
    for unit, name, digits in (1, "s", 2), (1e-3, "ms", 1), (1e-6, "us", 1):
        if seconds >= unit:
            return f"{seconds / unit:.{digits}f} {name}"
    return f"{seconds / 1e-9:.0f} ns"


def table(report):
    machine, builds = report["machine"], report["builds"]
    lines = [
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"llama.cpp {builds['llama.cpp']}, kvstate {builds['kvstate']}.",
    ]
    for group, rows in by_group(report["rows"]).items():
        size = f" ({rows[0]['bytes'] / 2**20:,.0f} MiB)" if rows[0]["bytes"] else ""
        lines += ["", f"| {group}{size} | llama.cpp | kvstate | ratio | quartiles | pairs |", "|---|---|---|---|---|---|"]
        for row in rows:
            ratio, call = row["ratio"], row["call"] + (f": {row['note']}" if row["note"] else "")
            sides = " | ".join(time(row[side]["median"]) for side in ("llama.cpp_s", "kvstate_s"))
            quartiles = f"{figure(ratio['q1'])} to {figure(ratio['q3'])}"
            lines.append(f"| {call} | {sides} | {figure(ratio['median'])} | {quartiles} | {row['pairs']} |")
    return "\n".join(lines)


def main():
    folder = pathlib.Path(sys.argv[1])
    report = json.loads((folder / "bench-llama.json").read_text())
    (folder / "bench-llama.svg").write_text(svg(report))
    page = folder / "bench-llama.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(report)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
