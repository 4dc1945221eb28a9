"""bench/h200/trace: traced rounds of the tiny engine under the driver double, and the pictures made of them."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
import emulation
from conftest import ROOT
from device_bundles import PROMPT, build_with_stubs
from ull import _native
from ull.bundle import Forward, Precision, device_macros, open_bundle
from ull_build.build import build
from ull_build.code.kernels import all_sources, compile_file, kernel_sources
from ull_build.settings import Settings
from ull_build.shapes import shape_model

sys.path.append(str(ROOT / "bench/h200"))


import timeline
import traced_round as trace

pytestmark = pytest.mark.timeout(1800)  # every kernel is compiled for the emulator
MULTIPROCESSORS = 4
COUNT = 4  # tokens
SIZES = (1, 16, 70)  # of what is traced; the last is a chunk
LAYERS = 6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    options: dict[str, Any] = {"target": "sm_90a", "evaluate": False, "context": 512}
    with pytest.MonkeyPatch.context() as patch:
        return build_with_stubs(
            patch, folder / "kernels", Settings(ROOT / "engines/tiny", folder / "tiny.ull", "tiny", **options)
        )


@pytest.fixture(scope="module")
def stamping(bundle: Path) -> Path:
    """Every kernel for the emulator, with stamps; compiled quickly rather than to run quickly."""
    code = open_bundle(bundle).manifest.code
    assert code is not None
    macros = {**code.macros, "ULL_TRACE": "1"}
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    flags = [*emulation.COMMON_FLAGS, *emulation.processor_flags()]
    sources = kernel_sources(frozenset(code.kernels()))
    jobs: list[tuple[Path, list[str]]] = [(source, [*flags, "-O0", *defines]) for source in sources]
    jobs += [(source, [*flags, emulation.EMULATOR_LEVEL]) for source in sorted(emulation.EMULATOR.glob("*.cpp"))]
    objects = emulation.compile_all(jobs, emulation.INCLUDES)
    return emulation.compiled(objects, ["-shared", "-Wl,-Bsymbolic", *flags], ".so")


def run(scenario: str, *arguments: object, kernels: Path) -> Any:
    program = f"import test_bench_trace as t; t.{scenario}(*{arguments!r})"
    environment = driver_double.environment(kernels, imports=[ROOT / "bench/h200"], multiprocessors=MULTIPROCESSORS)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def decoded(replay: Any) -> list[int]:
    replay.prefill(PROMPT[:-1])
    return [result.tokens[0].token for result in replay.decode(PROMPT[-1], len(PROMPT) - 1, COUNT)]


def scenario_traced(path: str, folder: str) -> None:
    traced = trace.load_traced(open_bundle(path))
    tracer = trace.Tracer(traced, traced._driver)
    tokens = decoded(tracer.replay)
    code = open_bundle(path).manifest.code
    assert code is not None
    found = []
    for size in SIZES:
        records = tracer.trace(size, 0 if size > 64 else len(PROMPT))
        found.append(trace.save(records, code.kernels(), Path(folder), f"tiny-{size}"))
        np.save(Path(folder) / f"records-{size}.npy", records)
    again = decoded(tracer.replay)
    traced.close()
    print(json.dumps([tokens, again, found]))


def scenario_bundle(path: str, folder: str) -> None:
    print(json.dumps(list(trace.trace_bundle(open_bundle(path), Path(folder), "tiny", [2, 65]))))


@pytest.fixture(scope="module")
def tokens_and_traces(
    bundle: Path, stamping: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("trace")
    tokens, again, found = run("scenario_traced", str(bundle), str(folder), kernels=stamping)
    assert tokens == again
    return folder, tokens, found


@pytest.fixture(params=SIZES)
def traced(request: pytest.FixtureRequest, tokens_and_traces: Any) -> tuple[Path, int, dict[str, Any], np.ndarray]:
    """Where the files are, how many tokens were traced, what the report has of it, and the records."""
    folder, _, found = tokens_and_traces
    return folder, request.param, found[SIZES.index(request.param)], np.load(folder / f"records-{request.param}.npy")


def layer_of(size: int) -> list[str]:
    """A layer's kernels, in order."""
    if size == 1:
        return ["qkv_1", "attention_1", "o_1", "gate_up_1", "down_1"]
    if size <= 64:
        qkv = [f"norm_{size}", f"qkv_{size}", f"qkv_sum_{size}", f"attention_{size}"]
        return [*qkv, f"o_{size}", f"norm_{size}", f"gate_up_{size}", f"down_{size}"]
    names = ("norm", "qkv", "store", "attention", "o", "norm", "gate_up", "down")
    return [f"chunk_{name}" for name in names]


def test_the_tokens_are_what_they_are_without_stamps(tokens_and_traces: Any, tmp_path: Path) -> None:
    """test_gpu_double.py holds untraced rounds to the same."""
    settings = Settings(ROOT / "engines/tiny", tmp_path / "cpu.ull", "cpu", evaluate=False, context=512)
    cpu_model = _native.CpuModel(open_bundle(build(settings).path).native_spec())
    assert tokens_and_traces[1] == cpu_model.generate_greedy(np.array(PROMPT, np.int32), COUNT).tolist()


def test_every_block_of_every_kernel_leaves_its_record(traced: Any) -> None:
    _, size, found, records = traced
    code_kernels = {trace.hash_of(f"ull_{name}"): name for name in found["kernels_us"]}
    assert set(records["kernel"].tolist()) == set(code_kernels) and len(records) == found["records"]
    launches = {name: row["launches"] for name, row in found["kernels_us"].items()}
    around = {
        1: ["begin", "embed", "head_1", "sample_plain"],
        16: ["begin", "embed", "norm_16", "head_16", *(f"sample_{part}" for part in ("scan", "filter", "draw"))],
    }
    around[16] += ["accept", "commit"]
    expected = Counter(layer_of(size) * LAYERS + around.get(size, ["begin_chunk", "chunk_embed", "accept"]))
    assert launches == expected
    for number, name in code_kernels.items():
        blocks = records["block"][records["kernel"] == number]
        assert np.array_equal(np.bincount(blocks), np.full(blocks.max() + 1, launches[name])), name


def test_stamps_are_in_order(traced: Any) -> None:
    _, size, _, records = traced
    ns = records["ns"].astype(np.int64)
    start, filled, waited, first, last, end = ns.T
    assert (start > 0).all() and (start <= waited).all() and (waited <= end).all()
    streams = filled > 0
    assert streams.any() != (size > 64) and (filled[streams] <= waited[streams]).all()
    used = first > 0
    assert used.any() and (waited[used] <= first[used]).all() and (first[used] <= last[used]).all()
    assert (last[used] <= end[used]).all()


def test_kernels_come_one_after_another(traced: Any) -> None:
    _, size, found, records = traced
    blocks = trace.blocks_of(records, [f"ull_{name}" for name in found["kernels_us"]])
    order = [kernel for kernel, _ in trace.launches_of(blocks)]
    layers = layer_of(size) * LAYERS
    assert order[:2] == (["begin_chunk", "chunk_embed"] if size > 64 else ["begin", "embed"])
    assert order[2 : 2 + len(layers)] == layers
    assert trace.two_layers(blocks) != (0.0, max(block.us[timeline.END] for block in blocks))


def test_the_pictures_are_whole(traced: Any) -> None:
    folder, size, found, _ = traced
    events = json.loads(gzip.decompress((folder / found["files"][0]).read_bytes()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert sum("args" in event for event in complete) == found["records"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    phases = {"streams", "prepares", "waits for its predecessor"} | ({"fills its ring"} if size <= 64 else set())
    assert phases <= {one["name"] for one in complete}
    check_png((folder / found["files"][1]).read_bytes())


def test_each_size_is_a_trace_of_its_own(bundle: Path, stamping: Path, tmp_path: Path) -> None:
    few, many = run("scenario_bundle", str(bundle), str(tmp_path), kernels=stamping)
    assert (few["model"], few["tokens"], few["position"]) == ("tiny", 2, trace.POSITION)
    assert (many["model"], many["tokens"], many["position"]) == ("tiny", 65, 0)
    assert "qkv_2" in few["kernels_us"] and "chunk_qkv" in many["kernels_us"]
    assert {path.name for path in tmp_path.iterdir()} == {*few["files"], *many["files"]}
    assert (
        few["files"][0] == "trace-tiny-2.json.gz" and many["files"][0] == "trace-tiny-65-chunk.json.gz"
    )  # packed apart


def check_png(data: bytes) -> np.ndarray:
    """Reads it as the format says: checks every chunk's sum; the pixels."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", data, place + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"] and not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def block(kernel: str, launch: int, number: int, sm: int, *us: float) -> timeline.Block:
    return timeline.Block(kernel, launch, number, sm, us)


NONE = float("nan")


def test_blocks_side_by_side_get_rows_of_their_own() -> None:
    blocks = [
        block("a", 0, 0, 3, 0, 1, 2, 3, 8, 10),
        block("b", 0, 0, 3, 4, NONE, 10, NONE, NONE, 12),
        block("a", 1, 0, 3, 10, 11, 12, 13, 14, 20),
        block("b", 0, 1, 5, 4, NONE, 10, NONE, NONE, 12),
    ]
    assert timeline.lanes(blocks) == [0, 1, 0, 0]
    image = timeline.draw_timeline(blocks, 0.0, 20.0)
    np.testing.assert_array_equal(check_png(timeline.png(image)), image)
    row = image[timeline.HEAD + 1]
    at = {us: timeline.MARGIN + round(us * (timeline.WIDTH - 2 * timeline.MARGIN) / 20) for us in (1, 5, 11, 16)}
    assert tuple(row[at[5]]) == timeline.COLOURS[0] and tuple(row[at[16]]) == timeline.COLOURS[0]
    assert row[at[1]].min() > row[at[5]].min() and row[at[11]].min() > row[at[16]].min()  # paler while they wait
    other = image[timeline.HEAD + 1 + timeline.ROW]
    assert tuple(other[at[11]]) == timeline.COLOURS[1] and tuple(other[at[16]]) == (255, 255, 255)


def records_of(ns: np.ndarray, ticks: np.ndarray, sms: np.ndarray) -> np.ndarray:
    records = np.zeros(len(ns), trace.RECORD)
    records["ns"], records["ticks"], records["multiprocessor"] = ns, ticks, sms
    return records


def test_a_coarse_timer_is_refined_by_the_clocks() -> None:
    """Ticks of 1.024 us, clocks of 1.755 GHz that began at different times: the fit is right to a few nanoseconds."""
    random = np.random.default_rng(0)
    sms = np.repeat(np.arange(8), 400)
    true = np.sort(random.uniform(1e6, 3e6, (len(sms), len(timeline.MARKS))), axis=1)
    coarse = (true // 1024 * 1024).astype(np.uint64)
    ticks = (true * 1.755 + sms[:, None] * 1e9).astype(np.uint64)
    records = records_of(coarse, ticks, sms)
    assert trace.timer_step_ns(records) == 1024
    assert np.abs(trace.stamps_ns(records) - true).max() < 30
    fine = records_of(true.astype(np.uint64) // 32 * 32, ticks, sms)
    np.testing.assert_array_equal(trace.stamps_ns(fine), fine["ns"].astype(float))


def test_the_summary_says_what_a_boundary_costs() -> None:
    first = [block("a", 0, index, index, 0, 1, 2, 3, 8, 10 + index) for index in range(2)]
    second = [block("b", 0, index, index, 4, NONE, 12.5 + index, NONE, NONE, 15) for index in range(2)]
    found = trace.summarise([*second, *first])
    assert list(found) == ["a", "b"]
    assert found["a"] == {
        "launches": 1,
        "crowded": 0,
        "ahead": 2.0,
        "release": None,
        "prepare": 1.0,
        "stream": 5.0,
        "finish": 2.5,
        "span": 9.0,
    }
    assert (found["b"]["release"], found["b"]["ahead"], found["b"]["stream"]) == (1.5, 8.5, None)


def test_multiprocessors_that_run_two_blocks_of_a_launch_are_counted() -> None:
    def ran(launch: int, index: int, multiprocessor: int, start: float, end: float) -> timeline.Block:
        return block("a", launch, index, multiprocessor, start, NONE, start, NONE, NONE, end)

    beside = [ran(0, 0, 5, 0, 4), ran(0, 1, 5, 3, 6), ran(0, 2, 6, 0, 9), ran(0, 3, 7, 1, 2), ran(0, 4, 7, 1, 3)]
    behind = [ran(1, 0, 5, 10, 14), ran(1, 1, 5, 14, 16), ran(1, 2, 6, 10, 12)]
    assert trace.crowded([*beside, *behind]) == {"a": [2, 0]}
    assert trace.summarise(beside)["a"]["crowded"] == 2


def test_records_of_no_kernel_are_refused() -> None:
    with pytest.raises(trace.TraceError, match="nobody knows"):
        trace.blocks_of(np.ones(1, trace.RECORD), ["ull_begin"])


STAMPED = ("embed", "output", "attention_pages", "chunk_linear", "chunk_attention")


@pytest.mark.parametrize("source", [source for source in all_sources() if source.stem in STAMPED])
def test_kernels_compile_with_stamps_and_are_the_same_without(source: Path) -> None:
    macros = device_macros(shape_model("llama-3.1-8b"), Precision(), forward=Forward(tree_products="warpgroup"))
    traced = compile_file(source, {**macros, "ULL_TRACE": "1"})  # refuses spills
    assert "serialized" not in traced.log
    plain = compile_file(source, macros)
    assert traced.kernels == plain.kernels and "%smid" in traced.ptx
    assert "%smid" not in plain.ptx and "%globaltimer" not in plain.ptx
