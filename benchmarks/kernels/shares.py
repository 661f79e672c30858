"""How near each kernel family comes to its floor, from the committed measurements alone.

    python -m benchmarks.kernels.shares           # computes, and fills the headers of kernels/*.cu
    python -m benchmarks.kernels.shares --check   # changes nothing; exit 1 if a header is stale

The floor of a layer is its roofline (`Device.roofline_s`). A family's rows are those of today's
kernel, in the first of these folders that has any: the hold-outs of the H100, those of the H200,
then what models learn from. A config's time is the median of its rows, and a problem's that of its
fastest config. Three layers stand for the quarter of the problems that moves the most bytes: those
at 25, 50 and 75 % of the order of their shares.

Headers are comments, so a kernel's digest stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.provenance import DATASETS, RESULTS, ROOT, write
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import operation_of_file, problem_columns, read
from confpred.families.kernel_text import source_digest
from confpred.families.protocol import Family
from confpred.families.registry import all_families, config_ids
from confpred.problem.device import get_device

KERNELS = ROOT / "kernels"
NAME = "kernel_shares"
DEVICES = ("h100", "h200")
QUANTILES = (0.25, 0.5, 0.75)
LARGEST, LEAST = 4, 5  # one in so many problems counts, or so many: those of the most bytes
NOT_MEASURED = "not measured yet."
_BLOCK = re.compile(r"^// Share of the floor:.*?\n(?!//)", re.DOTALL | re.MULTILINE)
_WIDTH = 118  # columns of a comment


def folders() -> list[Path]:
    """Return the folders of measurements, in the order in which they count."""
    parts = {part.parent for part in DATASETS.rglob("part-*.parquet")}
    kept = [p for p in parts if "anchors" not in p.parts and p.name in DEVICES]
    return sorted(kept, key=lambda p: ("holdout" not in p.parts, DEVICES.index(p.name), p))


def measured_in(folder: Path, left: dict[str, Family]) -> dict[str, Any]:
    """Return the facts of each of the families `left` that `folder` has rows of today's kernel
    of, by the family's name."""
    files = sorted(folder.glob("part-*.parquet"))
    operation = operation_of_file(files[0])
    wanted = [name for name, family in left.items() if family.operation.name == operation.name]
    if not wanted:
        return {}
    keys = [*problem_columns(operation), "family", "config"]
    facts = ("source_digest", "status", "time_ms", "time", "device_name", "driver")
    tables = [read(file, operation, [*keys, *facts]) for file in files]
    ok = (pc.field("status") == "ok") & pc.field("family").isin(pa.array(wanted))
    rows = pa.concat_tables(tables).filter(ok)
    found = {}
    for name in sorted(pc.unique(rows["family"]).to_pylist()):
        family = left[name]
        own = rows.filter(pc.field("family") == name)
        first = own.slice(0, 1).to_pylist()[0]
        problem = problem_of_row(first, operation.problem)
        source = family.launch(problem, config_ids(name)[first["config"]]).source
        if not source.endswith(".cu"):
            continue
        own = own.filter(pc.field("source_digest") == source_digest(source))
        if own.num_rows:
            latest = [("time_ms", "approximate_median"), ("time", "max"), ("driver", "max")]
            medians = own.group_by(keys).aggregate([*latest, ("device_name", "max")])
            layers = layers_of(medians, operation.problem, folder.name)
            data = folder.relative_to(ROOT).as_posix()
            found[name] = {"kernel": source, "data": data, "layers": layers}
    return found


def layers_of(medians: pa.Table, kind: Any, device: str) -> list[dict[str, Any]]:
    """Return three layers of one family's times, each with its fastest config."""
    facts, best = get_device(device), dict[Any, dict[str, Any]]()
    for row in medians.sort_by("time_ms_approximate_median").to_pylist():
        best.setdefault(problem_of_row(row, kind), row)
    count = max(LEAST, -(-len(best) // LARGEST))
    largest = sorted(best, key=lambda p: (-p.minimum_bytes, str(p)))[:count]
    ordered = []
    for problem in largest:
        floor_ms = facts.roofline_s(problem) * 1e3
        ordered.append((floor_ms / best[problem]["time_ms_approximate_median"], str(problem)))
    ordered.sort()
    chosen = [ordered[i] for i in sorted({round(q * (len(ordered) - 1)) for q in QUANTILES})]
    by_words = {str(problem): problem for problem in largest}
    found = []
    for share, words in chosen:
        problem, row = by_words[words], best[by_words[words]]
        memory = facts.memory_s(problem) >= facts.arithmetic_s(problem)
        found.append(
            {
                "problem": words,
                "config": row["config"],
                "time_ms": round(row["time_ms_approximate_median"], 5),
                "floor_ms": round(facts.roofline_s(problem) * 1e3, 5),
                "bound": "bytes" if memory else "arithmetic",
                "share": round(share, 3),
                "board": row["device_name_max"],
                "driver": row["driver_max"],
                "date": row["time_max"][:10],
            }
        )
    return found


def shares(only: list[Path] | None = None) -> dict[str, Any]:
    """Return the result: the facts of each measured family."""
    left, found = dict(all_families()), dict[str, Any]()
    for folder in folders() if only is None else only:
        found |= (more := measured_in(folder, left))
        for name in more:
            del left[name]
    return {"families": dict(sorted(found.items()))}


def block(kernel: str, result: dict[str, Any]) -> str:
    """Return the last paragraph of a kernel's header, from "Share of the floor" on."""
    lines = ["// Share of the floor:"]
    for name, family in result["families"].items():
        if family["kernel"] != kernel:
            continue
        first = family["layers"][0]
        dates = sorted({layer["date"] for layer in family["layers"]})
        lines.append(f"//   {name} on {first['board']}, {' and '.join(dates)}")
        for layer in family["layers"]:
            indent = f"//     {layer['share']:4.0%} of {layer['bound']}: "
            lines += wrapped(indent, layer["problem"])
    if len(lines) == 1:
        return f"{lines[0]} {NOT_MEASURED}\n"
    return "\n".join(lines) + "\n"


def wrapped(indent: str, words: str) -> list[str]:
    lines = [indent.rstrip()]
    for word in words.split():
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append("//" + " " * (len(indent) - 3))
        lines[-1] += f" {word}"
    return lines


def filled(kernel: str, text: str, result: dict[str, Any]) -> str:
    """Return a kernel's text with the paragraph made anew, if its header has one."""
    return _BLOCK.sub(lambda _: block(kernel, result), text, count=1)


def stale(result: dict[str, Any]) -> dict[Path, str]:
    """Return the kernels whose header is not that of `result`, with their new texts."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cu"))}
    made = {path: filled(path.name, text, result) for path, text in texts.items()}
    return {path: text for path, text in made.items() if text != texts[path]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the kernels' headers from measurements.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    if parser.parse_args().check:
        old = stale(json.loads((RESULTS / f"{NAME}.json").read_text()))
        sys.exit(f"stale: {', '.join(path.name for path in old)}" if old else 0)
    result = shares()
    write(NAME, result)
    for path, text in stale(result).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
