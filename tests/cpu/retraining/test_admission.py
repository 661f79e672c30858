"""Which files of measurements are taken: all that a GPU has measured, in shards of any kind."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from slow import slow_but

from confpred.cudnn.family import FAMILY, FAMILY_ND
from confpred.data.measurements import problem_of_row
from confpred.data.parquet import content_of, new_rows, operation_in, problem_columns
from confpred.families.registry import all_operations, config_ids
from confpred.model.folder import Model, NewestModels
from confpred.problem.device import get_device
from confpred.retraining.admission import RefusedShard, check_shard

ROOT = Path(__file__).parents[3]
PARTS = sorted(path for path in (ROOT / "datasets").rglob("part-*.parquet"))
ROWS = 20_000  # of a shard, as a sampler may send it


def candidates_of(table: pa.Table) -> pa.Table:
    """Return the rows without plans that were candidates when they were measured, and are none
    since: of images with groups, and of lines and volumes."""
    grouped = pc.and_(pc.equal(table["family"], FAMILY.name), pc.greater(table["groups"], 1))
    is_plan = pc.or_(grouped, pc.equal(table["family"], FAMILY_ND.name))
    keep = np.ones(table.num_rows, np.bool_)
    families = {family.name: family for family in (FAMILY, FAMILY_ND)}
    legal = cache(lambda name, problem: families[name].legal(problem, get_device("h200")))
    places = np.flatnonzero(is_plan.to_numpy())
    for place, line in zip(places, table.take(places).to_pylist(), strict=True):
        name = line["family"]
        problem = problem_of_row(line, families[name].operation.problem)
        keep[place] = legal(name, problem)[config_ids(name)[line["config"]]]
    return table.filter(pa.array(keep))


def shards(part: Path, folder: Path) -> list[Path]:
    """Write the rows of a part as shards of whole problems in the order of their measurement."""
    table = pq.read_table(part)
    operation = all_operations()[operation_in(part)]
    table = candidates_of(table) if operation.name in ("conv2d", "conv") else table
    columns = [pc.cast(table[name], pa.string()) for name in problem_columns(operation)]
    words = pc.binary_join_element_wise(*columns, "|").to_numpy(zero_copy_only=False)
    _, problem = np.unique(words, return_inverse=True)
    rows = np.lexsort((np.arange(len(problem)), problem))
    starts = np.flatnonzero(np.diff(problem[rows], prepend=-1))
    cuts = [int(starts[starts >= least][0]) for least in range(ROWS, len(rows), ROWS)
            if (starts >= least).any()]  # fmt: skip
    found = []
    for number, taken in enumerate(np.split(rows, sorted({*cuts}))):
        found.append(folder / f"{part.parent.name}-{number}.parquet")
        pq.write_table(table.take(taken), found[-1])
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: NewestModels()[name] for name in ("h100", "h200")}


@pytest.mark.parametrize(
    "part",
    slow_but([PARTS[0]], PARTS, reason="measurements of every part are checked"),
    ids=lambda part: str(part.relative_to(ROOT / "datasets").with_suffix("")),
)
def test_committed_measurements_are_taken(
    part: Path, tmp_path: Path, models: dict[str, Model]
) -> None:
    """Also those of every legal config, of layers that no model has seen; a few shards a part."""
    files = shards(part, tmp_path)
    for file in files[:: len(files) // 3 + 1]:
        shard = check_shard(file, models, [])
        assert shard.rows.num_rows == shard.sent
    assert files


@pytest.mark.parametrize("first", [420, 7_860, 24_960])
def test_few_problems_say_nothing_of_a_file(
    first: int, tmp_path: Path, models: dict[str, Model]
) -> None:
    """The model is wrong by 6 for one of the problems, or about their order."""
    rows = pq.read_table(ROOT / "datasets/h100/part-2026-11-25.parquet").slice(first, 60)
    pq.write_table(rows, tmp_path / "few.parquet")
    assert check_shard(tmp_path / "few.parquet", models, []).rows.num_rows == 60


def test_times_in_another_order_are_refused(tmp_path: Path, models: dict[str, Model]) -> None:
    part = sorted((ROOT / "datasets" / "holdout" / "h100").glob("*.parquet"))[0]
    file, *_ = shards(part, tmp_path)
    table = pq.read_table(file).slice(0, 14_000)
    ms = table["time_ms"].to_numpy().copy()
    key = [f"{problem_of_row(r, all_operations()['conv2d'].problem)}{r['family']}"
           for r in table.select([*problem_columns(all_operations()["conv2d"]), "family"])
           .to_pylist()]  # fmt: skip
    _, group = np.unique(key, return_inverse=True)
    rng = np.random.default_rng(0)
    for number in range(group.max() + 1):
        at = np.flatnonzero(group == number)
        ms[at] = ms[rng.permutation(at)]
    at = table.schema.get_field_index("time_ms")
    pq.write_table(table.set_column(at, "time_ms", pa.array(ms)), file)
    with pytest.raises(RefusedShard, match="in another order than"):
        check_shard(file, models, [])


def test_content_is_neither_a_run_nor_a_time_of_day(tmp_path: Path) -> None:
    part = next((ROOT / "datasets" / "h100").glob("*.parquet"))
    table, operation = pq.read_table(part).slice(0, 50), all_operations()["conv2d"]
    other = table
    for name in ("run_id", "time", "networks", "driver"):
        at = other.schema.get_field_index(name)
        other = other.set_column(at, name, pa.array(["other"] * 50))
    assert (content_of(table, operation) == content_of(other, operation)).all()
    new = new_rows(pa.concat_tables([table, other]), [], operation)
    assert new.num_rows == 50
    pq.write_table(new, tmp_path / "part-a.parquet")
    assert new_rows(other, [tmp_path / "part-a.parquet"], operation).num_rows == 0
    at = table.schema.get_field_index("time_ms")
    later = table.set_column(at, "time_ms", pc.multiply(table["time_ms"], 1.001))
    assert new_rows(later, [tmp_path / "part-a.parquet"], operation).num_rows == 50
