"""Every tile that tuning may choose computes the same values, in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from perfuse.autotune.device_kind import device_kind
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.run_alone import plan_of_one
from perfuse.autotune.tiles import (
    Device,
    choice_of,
    measured_tiles,
    question_of,
    race_tiles,
    tile_of,
    tuned_kernels,
)
from perfuse.autotune.tune_tiles import tune_tiles
from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.cache.keys import decision_key
from perfuse.cache.lock_file import lock_of, write_lock_file
from perfuse.codegen.triton.tiling import GpuLimits, candidates, choose_tile, smaller
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Decision, Question, ranked
from perfuse.errors import KernelTooLarge
from perfuse.schedule.plan import Kernel, Plan, with_tile
from perfuse.schedule.tile import Tile, TileKind
from perfuse.target import target_of
from perfuse.testing import fresh_cache
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of

SETTINGS = Settings()
SETTINGS = replace(SETTINGS, gpu=replace(SETTINGS.gpu, interpret=True))
CONTEXT = Context(target_of("cuda:90", SETTINGS), SETTINGS, Counters(), torch.device("cpu"))
SMALL = GpuLimits(num_processors=2)


def run(plan: Plan, tile: Tile, inputs: list[Tensor]) -> list[Tensor]:
    """The results of a plan of one kernel, cut by a tile."""
    backend = backend_of(CONTEXT.target)
    sources = backend.generate(with_tile(plan, tile), CONTEXT)
    built = backend.build(sources, CONTEXT)
    call = backend.load(backend.host(plan, sources, CONTEXT), built, {}, CONTEXT)
    return [r for r in call([x.clone() for x in inputs]) if isinstance(r, Tensor)]


def only_kernel(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Kernel, Plan]:
    plan = plans_of(fn, *inputs, context=CONTEXT)[0]
    (kernel,) = plan.kernels
    return kernel, plan_of_one(kernel, plan)


def normalised_and_summed(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.softmax(x, -1)
    return y * g, (y * g).sum(0)


def scaled_with_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.abs().amax()


def quantised_both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    small = (x * 3).clamp(-448, 448).to(torch.float8_e4m3fn)
    return small, small.t().contiguous()


def quantised_with_amax(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *quantised_both_ways(x), x.abs().amax()


def with_ties() -> Tensor:
    x = f32(9, 21).round()
    x[2, 5] = x[2, 9] = torch.nan
    x[4] = -torch.inf
    x[5, 20] = torch.inf
    return x


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "flat": (lambda x: x * 2 + 1, (f32(23, 7),)),
    "flat_all": (scaled_with_amax, (f32(23, 7),)),
    "grouped": (lambda x, s: x * s, (f32(7, 24), f32(7, 1))),
    "stacked": (lambda x, b: x + b, (f32(4, 3, 16), f32(3, 16))),
    "transposed": (lambda x: x.t().contiguous() + 1, (f32(37, 41),)),
    "transposed_eight_bits": (quantised_both_ways, (f32(37, 41),)),
    "transposed_all": (quantised_with_amax, (f32(37, 41),)),
    "rows": (lambda x: torch.softmax(x, -1), (f32(9, 21),)),
    "rows_var": (lambda x: x.var(-1), (f32(9, 21) + 5,)),
    "rows_argmax": (lambda x: x.argmax(-1), (with_ties(),)),
    "rows_argmin": (lambda x: x.argmin(-1), (with_ties(),)),
    "rows_outer": (normalised_and_summed, (f32(9, 21), f32(9, 21))),
    "rows_down": (lambda x: x.amax(1), (f32(3, 9, 17),)),
    "columns": (lambda x: x.sum(0), (f32(39, 21),)),
    "scan": (lambda x: x.cumsum(-1), (f32(5, 21),)),
}
# Tiles that the sizes above would not be given, so that each way of cutting is walked.
FORCED: dict[str, list[Tile]] = {
    "rows": [
        Tile(TileKind.ROWS, 1, 8, 1, is_swept=True),
        Tile(TileKind.ROWS, 2, 8, 1, is_swept=True),
        Tile(TileKind.ROWS, 2, 32, 1, num_stages=2, programs=2),
        Tile(TileKind.SPLIT, 1, 8, 1, 1, True, None, 2),
        Tile(TileKind.SPLIT, 4, 4, 1, 1, True, None, 3),
    ],
    "rows_argmax": [
        Tile(TileKind.ROWS, 2, 8, 1, is_swept=True),
        Tile(TileKind.SPLIT, 1, 8, 1, 1, True, None, 2),
    ],
    "grouped": [
        Tile(TileKind.GROUPED, 4, 8, 1),
        Tile(TileKind.GROUPED, 8, 8, 1),
        Tile(TileKind.FLAT, 1, 32, 1),
    ],
    "stacked": [Tile(TileKind.STACKED, 2, 16, 1), Tile(TileKind.STACKED, 4, 8, 1)],
    "rows_var": [
        Tile(TileKind.ROWS, 1, 8, 1, is_swept=True),
        Tile(TileKind.ROWS, 2, 4, 1, is_swept=True),
    ],
    "rows_outer": [
        Tile(TileKind.ROWS, 2, 32, 1, programs=2),
        Tile(TileKind.ROWS, 2, 32, 1, programs=1),
        Tile(TileKind.ROWS, 2, 8, 1, is_swept=True, programs=2),
        Tile(TileKind.ROWS, 1, 8, 1, is_swept=True, programs=1),
    ],
    "columns": [Tile(TileKind.COLUMNS, 4, 8, 1, splits=3), Tile(TileKind.COLUMNS, 4, 8, 1)],
    "scan": [Tile(TileKind.SCAN, 2, 8, 1, is_swept=True)],
    "flat_all": [
        Tile(TileKind.FLAT, 1, 32, 1, programs=2),
        Tile(TileKind.FLAT, 1, 64, 1, programs=1),
    ],
    "transposed_eight_bits": [
        Tile(TileKind.TRANSPOSED, 16, 32, 1),
        Tile(TileKind.TRANSPOSED, 32, 16, 1),
    ],
    "transposed_all": [
        Tile(TileKind.TRANSPOSED, 16, 32, 1, programs=2),
        Tile(TileKind.TRANSPOSED, 32, 16, 1, num_stages=2, programs=5),
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tile_gives_the_same_values(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    wanted = fn(*inputs)
    wanted = sorted(wanted if isinstance(wanted, tuple) else [wanted], key=lambda t: t.numel())
    kernel, alone = only_kernel(fn, *inputs)
    with fresh_cache():
        for tile in [choose_tile(kernel, SMALL), *FORCED.get(name, [])]:
            found = sorted(run(alone, tile, list(inputs)), key=lambda t: t.numel())
            assert len(found) == len(wanted)
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.dtype == theirs.dtype
                if ours.element_size() == 1:  # FP8 can only be compared as another dtype
                    ours, theirs = ours.float(), theirs.float()
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=str(tile))


def test_candidates_begin_with_the_models_choice_and_differ() -> None:
    for fn, inputs in PROGRAMS.values():
        kernel, _ = only_kernel(fn, *inputs)
        tiles = candidates(kernel, SMALL)
        assert tiles[0] == choose_tile(kernel, SMALL)
        assert len(set(tiles)) == len(tiles)


def raced(seconds: dict[Tile, float | Exception]) -> Decision:
    """The race of tiles that take these times, or fail."""
    _, alone = only_kernel(*_flat())

    def load(tile: Tile) -> Callable[[], float]:
        found = seconds[tile]
        if isinstance(found, Exception):
            raise found
        return lambda: found

    return race_tiles(alone, list(seconds), load, timer=lambda run: run)


FIRST, SECOND = Tile(TileKind.FLAT, 1, 128, 1), Tile(TileKind.FLAT, 1, 256, 1)


def test_a_challenger_has_to_win_by_a_margin() -> None:
    assert tile_of(raced({FIRST: 1.0, SECOND: 0.99}).chosen) == FIRST
    assert tile_of(raced({FIRST: 1.0, SECOND: 0.9}).chosen) == SECOND


def test_a_candidate_that_fails_is_out_but_the_models_choice_must_run() -> None:
    error = RuntimeError("too many registers")
    decision = raced({FIRST: 1.0, SECOND: error})
    assert tile_of(decision.chosen) == FIRST
    assert decision.rivals[1].refusal == "RuntimeError: too many registers"
    with pytest.raises(RuntimeError):
        raced({SECOND: error, FIRST: 1.0})


def test_a_models_choice_that_does_not_fit_is_out_too() -> None:
    error = KernelTooLarge("300000 bytes", ["kernel0"])
    assert tile_of(raced({FIRST: error, SECOND: 1.0}).chosen) == SECOND
    with pytest.raises(KernelTooLarge):
        raced({FIRST: error})


@pytest.mark.parametrize(
    ("columns", "shared_bytes", "num_stages", "programs"),
    [(32_000, 227 << 10, 2, 132), (32_000, 99 << 10, 1, None), (16_000, 227 << 10, 1, None)],
)
def test_what_is_on_its_way_fits_into_shared_memory(
    columns: int, shared_bytes: int, num_stages: int, programs: int | None
) -> None:
    kernel, _ = only_kernel(lambda x: x.amax(-1), f32(200, columns))
    tile = choose_tile(kernel, GpuLimits(shared_bytes=shared_bytes))
    assert (tile.num_stages, tile.programs) == (num_stages, programs)


def test_a_block_has_no_more_threads_than_the_gpu_gives_it() -> None:
    kernel, _ = only_kernel(lambda x: x.amax(-1), f32(200, 32_000))
    for warp in (32, 64):
        tiles = candidates(kernel, GpuLimits(warp_size=warp))
        assert max(warp * tile.num_warps for tile in tiles) == 1024


def test_columns_are_cut_by_what_is_moved_and_computed() -> None:
    x = torch.empty(16_384, 4096)
    plain, _ = only_kernel(lambda x: x.sum(0), x)
    dear, _ = only_kernel(lambda x: torch.tanh(x).exp().sum(0), x)
    assert str(choose_tile(plain, GpuLimits(), 4)) == "columns 32x128 / 8, 4 warps, 4 stages"
    assert str(choose_tile(plain, GpuLimits(), 2)) == "columns 128x64 / 8, 8 warps"
    assert str(choose_tile(dear, GpuLimits(), 2)) == "columns 64x64 / 4, 4 warps, 4 stages"
    # Of floats fewer elements: twice the registers would leave no room for a second block.
    assert str(choose_tile(dear, GpuLimits(), 4)) == "columns 16x128 / 8, 8 warps, 4 stages"


def test_what_is_only_read_takes_many_threads_and_no_stages() -> None:
    x = torch.empty(8192, 8192, dtype=torch.bfloat16)
    rows, _ = only_kernel(lambda x: x.sum(-1), x)
    places, _ = only_kernel(lambda x: x.argmax(-1), x)
    whole, _ = only_kernel(lambda x: x.amax(), x)
    assert str(choose_tile(rows, GpuLimits(), 2)) == "rows 1x8192, 16 warps"
    assert str(choose_tile(places, GpuLimits(), 2)) == "rows 1x8192, 4 warps"
    assert str(choose_tile(whole, GpuLimits(), 2)) == "flat 1x2048, 8 warps, 1056 programs"


@pytest.mark.parametrize(("num_loads", "columns"), [(4, 2048), (5, 1024)])
def test_blocks_are_smaller_where_much_is_loaded(num_loads: int, columns: int) -> None:
    given = [torch.empty(1024, 1024, dtype=torch.bfloat16) for _ in range(num_loads)]
    kernel, _ = only_kernel(lambda *xs: sum(xs), *given)
    assert choose_tile(kernel, GpuLimits(), widest=2).columns == columns


@pytest.mark.parametrize("name", PROGRAMS)
def test_smaller_tiles_come_to_an_end(name: str) -> None:
    kernel, _ = only_kernel(PROGRAMS[name][0], *PROGRAMS[name][1])
    tile: Tile | None = choose_tile(kernel, SMALL)
    seen = []
    while tile is not None:
        assert tile not in seen
        seen.append(tile)
        tile = smaller(tile)
    assert seen[-1].num_stages == 1


def _flat() -> tuple[Callable[..., Any], Tensor]:
    fn, (x,) = PROGRAMS["flat"]
    return fn, x


def test_measured_tiles_are_stored_and_carried_by_the_plan() -> None:
    (plan,) = plans_of(PROGRAMS["rows"][0], *PROGRAMS["rows"][1], context=CONTEXT)
    times = itertools.count(10, -1)  # each candidate faster than the one before
    device = Device(
        lambda *_: None, lambda _: lambda tile: partial(float, next(times)), timer=lambda run: run
    )
    with fresh_cache() as folder:
        changes = {"thresholds.tuned_tile_bytes": 0, "cache.dir": str(folder)}
        settings = SETTINGS.with_overrides(changes)
        context = replace(CONTEXT, settings=settings, counters=Counters())
        tuned = measured_tiles(plan, context, device)
        again = measured_tiles(plan, context, device)
    (kernel,), (decision,) = plan.kernels, tuned.decisions
    assert len(decision.rivals) > 1 and decision.chosen == decision.rivals[-1].choice
    assert tuned.tiles == {kernel.name: tile_of(decision.chosen)} == again.tiles
    assert again.decisions == tuned.decisions
    assert context.counters["autotune.kernels_measured"] == 1
    assert context.counters["autotune.cache_hit"] == 1


def asked(fn: Callable[..., Any], *inputs: Tensor, context: Context = CONTEXT) -> Question:
    """The question which tile is best for the last kernel of a function."""
    plan = plans_of(fn, *inputs, context=context)[0]
    return question_of(plan_of_one(plan.kernels[-1], plan), context)


def test_a_question_has_no_names_of_the_program_in_it() -> None:
    x, y = f32(64, 300), f32(16, 8)
    alone = asked(lambda x: torch.softmax(x, -1), x)
    later = asked(lambda x, y: (y.exp().sum(), torch.softmax(x, -1)), x, y)
    assert alone == later
    assert alone != asked(lambda x: torch.softmax(x, -1), f32(64, 301))
    assert alone != asked(lambda x: torch.softmax(x * 2, -1), x)
    assert alone != asked(lambda x: torch.softmax(x, -1), x.half())


def test_a_question_outlives_edits_that_leave_the_kernel_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = asked(lambda x: x * 2, f32(64, 300))
    before = decision_key(question)
    monkeypatch.setattr(keys, "VERSION", "another")
    monkeypatch.setattr(keys, "PACKAGE", keys.PACKAGE / "elsewhere")
    keys.code_digest.cache_clear()
    assert decision_key(question) == before
    keys.code_digest.cache_clear()


def test_settings_count_by_the_code_they_change() -> None:
    def with_(**overrides: Any) -> Question:
        context = replace(CONTEXT, settings=SETTINGS.with_overrides(overrides))
        return asked(lambda x: x.exp() / 3, f32(64, 300), context=context)

    assert with_() == with_(recompute_level=2)
    assert with_() != with_(**{"gpu.approximate": True})


def test_the_kind_of_a_gpu_is_that_of_the_one_present() -> None:
    """An H200 reports 4.9 TB/s, its maker 4.8; other parts of the architecture are other kinds."""
    gpu = CONTEXT.target.gpu
    assert gpu is not None
    kinds = [
        device_kind(replace(CONTEXT.target, gpu=replace(gpu, bandwidth=rate)))
        for rate in (4.8e12, 4.917e12, 3.35e12)
    ]
    assert kinds[0] == kinds[1] != kinds[2]
    assert kinds[0] == "cuda sm_90, 132 multiprocessors, about 5 TB/s"


def test_a_lock_file_pins_tiles_where_nothing_is_measured(tmp_path: Path) -> None:
    x = f32(64, 300)
    settings = replace(SETTINGS, thresholds=replace(SETTINGS.thresholds, tuned_tile_bytes=0))
    plain = replace(CONTEXT, settings=settings, counters=Counters())
    (plan,) = plans_of(lambda x: torch.softmax(x, -1), x, context=plain)
    question = question_of(plan_of_one(plan.kernels[0], plan), plain)
    pinned = question.candidates[-1]
    path = str(tmp_path / "perfuse.lock")
    write_lock_file(path, lock_of([ranked("softmax", question, (pinned,))]))
    locked = replace(plain, settings=settings.with_overrides({"lock_file": path}))
    tuned = tune_tiles(plan, locked)
    assert tune_tiles(plan, plain) == plan, "without a file, nothing is looked up"
    assert tuned.tiles == {plan.kernels[0].name: tile_of(pinned)}
    assert pinned != choice_of(choose_tile(plan.kernels[0], GpuLimits(), 4))
    assert plain.counters["autotune.lock_hit"] == 1
    with fresh_cache() as folder:  # in which a search finds nothing
        changes = {"search_autotune_cache": True, "cache.dir": str(folder)}
        search = replace(plain, settings=settings.with_overrides(changes))
        left = tune_tiles(plan, search)
    assert left.tiles == plan.tiles and [d.is_open for d in left.decisions] == [True]


class SharedCache:
    """A remote cache in this process."""

    documents: ClassVar[dict[str, Any]] = {}

    def __init__(self, key: str, is_autotune: bool = False) -> None:
        assert is_autotune

    def get(self, filename: str) -> Any:
        return self.documents.get(filename)

    def put(self, filename: str, data: Any) -> None:
        assert filename not in self.documents, "one put serves all compiles"
        self.documents[filename] = json.loads(json.dumps(data))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_largest_kernel_is_asked_for_where_decisions_are_shared(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small it is, and whatever sizes it has; beside a matmul it does not matter."""
    monkeypatch.setattr("perfuse.cache.RedisRemoteCacheBackend", SharedCache)
    SharedCache.documents.clear()
    changes = {"autotune_local_cache": False, "autotune_remote_cache": True}
    context = replace(CONTEXT, settings=SETTINGS.with_overrides(changes), counters=Counters())
    x, y = f32(100, 100), f32(100, 100)
    (plan,) = plans_of(torch.add, x, y, dynamic=dynamic, context=context)
    loaded: list[list[Tensor]] = []

    def load(alone: Plan) -> Callable[[Tile], Callable[[], Any]]:
        inputs = list(random_inputs(alone.program, CONTEXT.device).values())
        loaded.append(inputs)
        return lambda tile: lambda: run(alone, tile, inputs)

    device = Device(lambda alone, tile: None, load, lambda run: lambda: (run(), 1.0)[1])
    made = [measured_tiles(plan, context, device) for _ in range(4)]
    assert len(SharedCache.documents) == 1 and len({str(m.decisions) for m in made}) == 1
    assert context.counters["autotune.remote_hit"] == 3
    assert [tuple(t.shape) for t in loaded[0]] == [(100, 100)] * 2 and len(loaded) == 1
    (beside,) = plans_of(lambda x, y: x @ y.sin(), x, y, context=context)
    assert not tuned_kernels(beside, context) and not tuned_kernels(plan, CONTEXT)
