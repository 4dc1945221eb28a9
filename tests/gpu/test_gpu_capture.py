"""Loading an engine onto a GPU, against a driver that records: memory, launches, graphs, and every way to refuse."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import write_checkpoint
from device_bundles import build_with_stubs, write_stubs
from recording_driver import H200, HOST_OFFSET, PROBE, Launched, RecordingDriver
from ull.bundle import TOKEN_COUNTS, Bundle, Precision, inverse_frequencies, open_bundle
from ull.errors import BundleError, GpuError
from ull.gpu import checks, params
from ull.gpu.arena import REGION_ALIGNMENT, ArenaPlan
from ull.gpu.driver import Driver
from ull.gpu.geometry import chunk, sampling
from ull.gpu.memory import Sizes, plan_memory, rope_table
from ull.gpu.program import Program
from ull.gpu.rounds import BURST_ROUNDS
from ull.log import Log
from ull_build.benchmark_bundle import RandomSettings, build_random
from ull_build.code import kernels
from ull_build.recipe import ForwardRecipe
from ull_build.settings import Settings
from ull_build.shapes import shape_model

DIMENSIONS = {
    "head_dim": 32,
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "vocab_size": 333,
    "max_position_embeddings": 300,
}
CONTEXT = 300


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bundle(tmp_path_factory.mktemp("bundle"), ForwardRecipe())


def build_bundle(folder: Path, forward: ForwardRecipe) -> Path:
    """A Qwen3 with QK norms and FP8 pages: every optional pointer but the biases is there."""
    checkpoint = write_checkpoint(folder / "model", "qwen3", config={**DIMENSIONS, "max_position_embeddings": CONTEXT})
    options = {
        "target": "sm_90a",
        "evaluate": False,
        "precision": Precision(kv="fp8"),
        "context": CONTEXT,
        "forward": forward,
    }
    with pytest.MonkeyPatch.context() as patch:
        return build_with_stubs(patch, folder / "kernels", Settings(checkpoint, folder / "x.ull", "x", **options))


@pytest.fixture
def bundle(bundle_path: Path) -> Bundle:
    return open_bundle(bundle_path)


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


def load(bundle: Bundle, driver: Driver, **options: Any) -> Program:
    return Program(bundle, Log(stream=io.StringIO()), driver=driver, **options)


@pytest.fixture
def program(bundle: Bundle, driver: RecordingDriver) -> Iterator[Program]:
    loaded = load(bundle, driver)
    yield loaded
    loaded.close()


def graph_of(program: Program, driver: RecordingDriver, tokens: int) -> list[Launched]:
    return driver.graphs[program.handover["graphs"][tokens]]


# What is captured


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
def test_a_round_is_the_kernels_in_order(program: Program, driver: RecordingDriver, tokens: int) -> None:
    tile = {1: 8, 2: 8, 4: 8}.get(tokens, tokens)
    narrow = tokens  # the linear kernels have variants for few tokens
    attention = 1 if tokens == 1 else tile
    norm = [f"ull_norm_{tile}"] if tokens >= 16 else []
    qkv = [f"ull_qkv_{narrow}", *([f"ull_qkv_sum_{tile}"] if norm else [])]
    layer = [*norm, *qkv, f"ull_attention_{attention}", f"ull_o_{narrow}", *norm]
    layer += [f"ull_gate_up_{narrow}", f"ull_down_{narrow}"]
    sample = ["ull_sample_scan", "ull_sample_draw", "ull_sample_filter"]
    commit = ["ull_commit"] if tokens > 1 else []
    expected = ["ull_begin", "ull_embed", *layer * 2, *norm, f"ull_head_{narrow}", *sample, "ull_accept", *commit]
    graph = graph_of(program, driver, tokens)
    assert [launch.kernel for launch in graph] == expected
    assert [launch.overlaps for launch in graph] == [False, False] + [True] * (len(graph) - 2)


@pytest.mark.parametrize(("granted", "resident"), [(66, 1), (132, 0)])
def test_blocks_that_could_not_all_run_at_once_are_refused(
    bundle: Bundle, driver: RecordingDriver, granted: int, resident: int
) -> None:
    """As under an MPS thread limit. The chain of kernels does not mind."""
    driver.granted, driver.resident = granted, resident
    message = rf"132 blocks of ull_layers_1 .* {granted} multiprocessors with room for {resident} of them each"
    with pytest.raises(GpuError, match=message):
        load(bundle, driver, persistent=True)
    assert not any(driver.live.values())
    load(bundle, driver).close()


# Before they wait: what begin and earlier rounds wrote.
READ_EARLY = {"ull_attention_1", "ull_attention_pages", "ull_layers_1"}


def check_edges(graph: list[Launched]) -> None:
    """Wherever a kernel reads early, one between the round's begin and it has not started before begin had ended."""
    begun = False
    for launch in graph:
        begun = begun or not launch.overlaps
        if launch.kernel == "ull_begin":
            begun = False
        assert begun or launch.kernel not in READ_EARLY, f"{launch.kernel} may read what begin has yet to write"


def test_what_begin_wrote_is_there_for_kernels_that_read_early(bundle: Bundle, driver: RecordingDriver) -> None:
    for persistent in (False, True):
        program = load(bundle, driver, persistent=persistent)
        try:
            plain = graph_of(program, driver, 1)
            assert READ_EARLY & {launch.kernel for launch in plain}
            for graph in driver.graphs.values():
                check_edges(graph)
            check_edges(plain * 2)  # rounds one after another
            faulty = [dataclasses.replace(one, overlaps=one.kernel != "ull_begin") for one in plain]
            with pytest.raises(AssertionError, match="may read what begin has yet to write"):
                check_edges(faulty)
        finally:
            program.close()


def test_a_round_that_filters_nothing_has_one_kernel_behind_the_head(program: Program, driver: RecordingDriver) -> None:
    """And several of them in one graph are the same again and again, each overlapping with the one before."""
    full = graph_of(program, driver, 1)
    handover = program.handover
    single = driver.graphs[handover["singles"]["plain"]]
    names = [launch.kernel for launch in full]
    forward = names[: names.index("ull_sample_scan")]
    assert [launch.kernel for launch in single] == [*forward, "ull_sample_plain"]
    assert [launch.overlaps for launch in single] == [False, False] + [True] * (len(single) - 2)
    head, plain = single[-2], single[-1]
    assert head.kernel == "ull_head_1" and plain.params.parts == head.grid[0]
    assert head.params.maxima == plain.params.sample.scratch + sampling.MAXIMA_AT
    used = {address for graph in driver.graphs.values() for one in graph for address in counters_of(one)}
    begin = full[0].params
    assert plain.params.counters not in used
    assert begin.counters <= plain.params.counters < begin.counters + 4 * begin.counter_count
    accept = full[-1]
    assert accept.kernel == "ull_accept" and bytes(plain.params.accept) == bytes(accept.params)
    burst = driver.graphs[handover["bursts"]["plain"]]
    assert handover["burst_rounds"] == BURST_ROUNDS and len(burst) == BURST_ROUNDS * len(single)
    assert [(one.kernel, one.grid, bytes(one.params)) for one in burst] == BURST_ROUNDS * [
        (one.kernel, one.grid, bytes(one.params)) for one in single
    ]
    assert burst[len(single)].kernel == "ull_begin"
    overlaps = [True, False] + [True] * (len(single) - 2)  # begin, embed, ...
    assert [launch.overlaps for launch in burst] == [False, *(BURST_ROUNDS * overlaps)[1:]]


def test_every_kernel_divides_a_multiprocessor_alike(program: Program, driver: RecordingDriver) -> None:
    assert {launch.function for graph in driver.graphs.values() for launch in graph} <= driver.preferring


def test_all_layers_of_a_plain_round_can_be_one_kernel(bundle: Bundle, driver: RecordingDriver) -> None:
    """With the parameters that the kernels of the single steps get in another round, which keep their chains."""
    program = load(bundle, driver, persistent=True)
    try:
        plain, pair = graph_of(program, driver, 1), graph_of(program, driver, 2)
        sample = ["ull_sample_scan", "ull_sample_draw", "ull_sample_filter"]
        expected = ["ull_begin", "ull_embed", "ull_layers_1", "ull_head_1", *sample, "ull_accept"]
        assert [launch.kernel for launch in plain] == expected
        assert [launch.overlaps for launch in plain] == [False, False] + [True] * 6
        layers, begin = plain[2], plain[0].params
        assert (layers.grid, layers.threads, layers.shared_bytes) == ((H200.multiprocessors, 1), 256, 224 << 10)
        assert layers.params.round == program._arena.address("round")
        used = {address for graph in driver.graphs.values() for one in graph for address in counters_of(one)}
        assert layers.params.arrivals not in used
        assert begin.counters <= layers.params.arrivals < begin.counters + 4 * begin.counter_count
        chain = pair[2:12]
        assert [launch.kernel for launch in chain[:5]] == [
            *("ull_qkv_2", "ull_attention_8", "ull_o_2", "ull_gate_up_2", "ull_down_2")
        ]
        order = [chain[5 * layer + step].params for layer in range(2) for step in (0, 2, 3, 4, 1)]
        stored = driver.device_bytes(layers.params.layers, program._plan.regions["layer parameters"].nbytes)
        assert stored.tobytes() == b"".join(map(bytes, order))
    finally:
        program.close()


def pointers_of(parameters: ctypes.Structure) -> Iterator[tuple[str, int | None]]:
    """Fields and their values, those of structs within too."""
    for field, kind in parameters._fields_:
        if kind is ctypes.c_void_p:
            yield field, getattr(parameters, field)
        elif issubclass(kind, ctypes.Structure):
            yield from pointers_of(getattr(parameters, field))


def counters_of(launch: Launched) -> list[int]:
    """Addresses that a kernel counts at; begin clears them all."""
    if launch.kernel.startswith("ull_attention"):
        return [launch.params.counters + 4 * index for index in range(4 * 64 // 16)]
    return [launch.params.counters] if launch.kernel == "ull_commit" else []


def test_a_prefill_has_neither_head_nor_sampler(program: Program, driver: RecordingDriver) -> None:
    names = [launch.kernel for launch in driver.graphs[program.handover["prefill"]]]
    assert names[:2] == ["ull_begin", "ull_embed"] and names[-3:] == ["ull_down_64", "ull_accept", "ull_commit"]
    assert names[2:6] == ["ull_norm_64", "ull_qkv_64", "ull_qkv_sum_64", "ull_attention_64"]
    assert names[6:8] == ["ull_o_64", "ull_norm_64"]
    # The plain round, alone and in a burst, what draws again, a chunk of a prompt, and one that draws.
    assert len(driver.graphs) == len(TOKEN_COUNTS) + 1 + 2 + 2 + 1 + 1


def test_what_draws_again_is_a_sampler_without_a_forward(program: Program, driver: RecordingDriver) -> None:
    """One draw by the whole device, or 64 side by side, each on the logits that rounds leave."""
    handover = program.handover
    assert set(handover["redraws"]) == {1, 64}
    for draws, graph in handover["redraws"].items():
        launches = driver.graphs[graph]
        sample = ["ull_sample_scan", "ull_sample_draw", "ull_sample_filter"]
        assert [launch.kernel for launch in launches] == ["ull_begin", *sample, "ull_accept"]
        assert [launch.overlaps for launch in launches] == [False, True, True, True, True]
        of_round = graph_of(program, driver, draws)
        for launch in launches:
            same = next(one for one in of_round if one.kernel == launch.kernel)
            assert (launch.grid, bytes(launch.params)) == (same.grid, bytes(same.params))
        begin, sampler = launches[0].params, launches[1].params
        assert begin.mask == sampler.mask == program._arena.address("mask")
        assert begin.host_mask == handover["mask"] + HOST_OFFSET


def test_every_launch_fits_the_device(program: Program, driver: RecordingDriver) -> None:
    for graph in driver.graphs.values():
        for launch in graph:
            assert all(size >= 1 for size in launch.grid) and launch.grid[1] <= 65535
            assert launch.threads % 32 == 0 and 32 <= launch.threads <= 1024
            assert launch.shared_bytes <= H200.shared_bytes


def test_every_pointer_names_the_beginning_of_what_it_means(program: Program, driver: RecordingDriver) -> None:
    """By the struct's field: the region, and for weights the tensor."""
    region = {name: program._arena.address(name) for name in program._plan.regions}
    bundle, image = program._bundle, program._image

    def tensor(name: str) -> int | None:
        return None if name not in bundle.tensors else region["weights"] + (image.offset(name) or 0)

    same = {
        "round": "round",
        "state": "state",
        "pages": "page table",
        "table": "embed.weight",
        "normed": "normed",
        "rope": "rope",
        "page_pool": "KV pages",
        "logits": "logits",
        "scratch": "sampler",
        "text": "text",
        "text_counts": "text counts",
        "mask": "mask",
    }
    outputs = {"qkv": "qkv", "attention": "attention", "o": "residual", "gate_up": "mlp", "down": "residual"}
    inputs = {"qkv": "normed", "o": "attention", "gate_up": "normed", "down": "mlp", "head": "normed"}
    norms = {"qkv": "attn_norm", "gate_up": "mlp_norm"}
    chunks = [program.handover[name] for name in ("chunk", "last_chunk")]
    for graph in (launches for handle, launches in driver.graphs.items() if handle not in chunks):
        layer = 0
        left = None  # the layer whose partial sums the next norm finishes
        for launch in graph:
            if launch.kernel == "ull_begin":
                layer = 0
            kernel = launch.kernel.removeprefix("ull_").rstrip("0123456789").rstrip("_").removesuffix("_sum")
            name = "lm_head" if kernel == "head" else f"layers.{layer}.{kernel}"
            for field, value in pointers_of(launch.params):
                if field in same and field != "table":
                    assert value == region[same[field]], (launch.kernel, field)
                elif field == "table":
                    assert value == tensor("embed.weight")
                elif field == "residual":
                    assert value == region["residual"]
                elif field == "weights":
                    assert value == tensor(f"{name}.weight")
                elif field == "partial" and kernel == "norm":
                    assert value == (None if left is None else region["partial sums"])
                elif field == "partial":
                    assert value == region["attention parts" if kernel == "attention" else "partial sums"]
                elif field == "scale" and kernel == "norm":
                    assert value == (None if left is None else tensor(f"{left}.scale"))
                    assert left is None or launch.params.unit == (1.0 if left.endswith(".o") else 16.0)
                elif field == "scale":
                    assert value == tensor(f"{name}.scale")
                elif field == "bias":
                    assert value is None
                elif field == "activations":
                    assert value == region[inputs[kernel]]
                elif field == "output":
                    assert value == region["logits" if kernel == "head" else outputs[kernel]]
                elif field in ("q_norm", "k_norm", "kv_scale"):
                    assert value == tensor(f"layers.{layer}.{field}")
            if launch.kernel.startswith("ull_attention"):
                sizes = program.sizes
                assert launch.params.tree_keys == region["tree keys"] + layer * sizes.tree_bytes
                assert launch.params.tree_values == region["tree values"] + layer * sizes.tree_bytes
                assert launch.params.layer_offset == layer * sizes.layer_page_bytes
                assert launch.params.page_bytes == sizes.page_bytes
            if kernel in norms and "_sum_" not in launch.kernel:
                assert launch.params.norm_weight == tensor(f"layers.{layer}.{norms[kernel]}")
            if kernel == "head":
                assert launch.params.norm_weight == tensor("norm")
            left = name if kernel in ("o", "down") else left
            layer += kernel == "down"
            layer = min(layer, program.sizes.model.layers - 1)


def test_every_pointer_lies_in_the_arena_or_in_mapped_memory(program: Program, driver: RecordingDriver) -> None:
    arena, end = program._arena.base, program._arena.base + program._plan.nbytes
    host = program.handover
    mapped = (host["requests"] + HOST_OFFSET, host["chunks"] + 4 * 4 * 512 + HOST_OFFSET)
    for graph in driver.graphs.values():
        for launch in graph:
            for field, value in pointers_of(launch.params):
                if value is not None:
                    inside = arena <= value < end or mapped[0] <= value < mapped[1]
                    assert inside and value % 4 == 0, (launch.kernel, field)


def test_counters_are_nobody_elses(program: Program, driver: RecordingDriver) -> None:
    """Each user of counters has its own, and begin() clears them all."""
    graph = graph_of(program, driver, 64)
    begin = graph[0].params
    spans = []
    for launch in [*graph, *driver.graphs[program.handover["singles"]["plain"]][-1:]]:
        if isinstance(launch.params, params.AttentionParams):
            spans.append((launch.params.counters, program.sizes.attention_counters))
        elif isinstance(launch.params, params.CommitParams | params.PlainParams):
            spans.append((launch.params.counters, 1))
    chunks = [launch.params for launch in driver.graphs[program.handover["chunk"]]]
    of_chunks = {each.counters for each in chunks if isinstance(each, params.ChunkAttentionParams)}
    spans.extend((counters, chunk.attention_counter_count(program.sizes.model.heads)) for counters in of_chunks)
    assert len(of_chunks) == 1  # of one layer after another
    spans.sort()
    assert spans[0][0] == begin.counters
    for (start, count), (following, _) in itertools.pairwise(spans):
        assert start + 4 * count <= following
    assert spans[-1][0] + 4 * spans[-1][1] == begin.counters + 4 * begin.counter_count


# Memory


def test_regions_do_not_overlap(program: Program) -> None:
    end = 0
    for region in sorted(program._plan.regions.values(), key=lambda item: item.offset):
        assert region.offset >= end and region.offset % REGION_ALIGNMENT == 0
        end = region.offset + region.nbytes
    assert end <= program._plan.nbytes


def test_the_weights_are_the_files_bytes(program: Program, driver: RecordingDriver, bundle: Bundle) -> None:
    raw = bundle.weights_path.read_bytes()
    for name, entry in bundle.tensors.items():
        address = program._models[""].placed.places.tensor(name)
        assert address is not None
        assert driver.device_bytes(address, entry.nbytes).tobytes() == raw[entry.offset : entry.offset + entry.nbytes]


def test_what_is_not_weights_starts_as_zeros(program: Program, driver: RecordingDriver) -> None:
    """Padding columns of activations are multiplied with weights of zero, and NaN * 0 is NaN."""
    for name, region in program._plan.regions.items():
        if name not in ("weights", "rope", "state"):
            assert not driver.device_bytes(program._arena.base + region.offset, region.nbytes).any(), name
    state = params.State.from_buffer_copy(driver.device_bytes(program._arena.address("state"), 4096 * 3))
    assert state.sequence == 1 and state.setting == 0


def test_the_rope_table_is_the_cpu_executors(program: Program, driver: RecordingDriver, bundle: Bundle) -> None:
    model = bundle.manifest.model
    region = program._plan.regions["rope"]
    table = driver.device_bytes(program._arena.address("rope"), region.nbytes).view(np.float32)
    table = table.reshape(CONTEXT, model.head_dim // 2, 2)
    frequencies = inverse_frequencies(model.rope, model.head_dim)
    for position, pair in ((0, 0), (1, 0), (299, 3), (123, model.head_dim // 2 - 1)):
        angle = float(np.float32(position) * frequencies[pair])
        assert table[position, pair].tolist() == [np.float32(math.cos(angle)), np.float32(math.sin(angle))]
    np.testing.assert_array_equal(table, rope_table(model, CONTEXT))


@pytest.mark.parametrize(("arch", "context", "gigabytes"), [("llama-3.1-8b", 8192, 10.5), ("llama-3.3-70b", 32768, 87)])
def test_memory_of_real_models(arch: str, context: int, gigabytes: float) -> None:
    from ull.bundle import device_tensors

    model, precision = shape_model(arch), Precision()
    weights = sum(shape.nbytes for shape in device_tensors(model, precision).values() if not shape.optional)
    plan = plan_memory(Sizes(model, precision, context), weights)
    assert plan.nbytes / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_a_region_has_one_owner() -> None:
    plan = ArenaPlan()
    plan.reserve("x", 1)
    with pytest.raises(ValueError, match="twice"):
        plan.reserve("x", 1)


# Hand-over


def test_the_hand_over_is_plain_numbers(program: Program, driver: RecordingDriver, bundle: Bundle) -> None:
    handover = program.handover
    assert set(handover["graphs"]) == set(TOKEN_COUNTS)
    assert all(type(value) in (int, str, dict) for value in handover.values())
    assert handover["context_tokens"] == CONTEXT and handover["page_count"] == 5
    assert handover["vocabulary"] == 333 and handover["name"] == "graph/sm_90a"
    assert handover["weight_bytes"] == bundle.weight_bytes
    assert handover["kv_bytes"] == 5 * 2 * 2 * 2 * 64 * 32  # pages, layers, K and V, KV heads, tokens, head_dim of e4m3
    assert handover["kv_pages"] == program._arena.address("KV pages")
    blocks = [handover[name] for name in ("requests", "results", "control", "pages", "text", "mask")]
    assert all(address % 64 == 0 for address in blocks) and blocks == sorted(blocks)
    assert blocks[3] == blocks[2] + ctypes.sizeof(params.HostControl)
    begin = graph_of(program, driver, 1)[0].params
    assert [begin.requests, begin.control, begin.host_pages, begin.host_text, begin.host_mask] == [
        address + HOST_OFFSET for address in (blocks[0], *blocks[2:])
    ]
    assert begin.text_capacity == CONTEXT and (handover["medusa"], handover["medusa_heads"]) == (0, 0)


def test_context_and_pages_can_be_chosen(bundle: Bundle, driver: RecordingDriver) -> None:
    program = load(bundle, driver, context=100, pages=40)
    handover = program.handover
    assert (handover["context_tokens"], handover["page_count"]) == (100, 40)
    assert graph_of(program, driver, 1)[0].params.page_capacity == 2
    program.close()


def test_closing_gives_everything_back(bundle: Bundle, driver: RecordingDriver) -> None:
    load(bundle, driver).close()
    assert not any(driver.live.values())


ONCE = ("open", "create_stream", "allocate")
TWICE = ("allocate_host", "create_event", "load_module", "launch", "end_capture", "instantiate")


@pytest.mark.parametrize(("call", "after"), [(call, 0) for call in ONCE + TWICE] + [(call, 1) for call in TWICE])
def test_a_failure_gives_everything_back(bundle: Bundle, driver: RecordingDriver, call: str, after: int) -> None:
    seen = 0

    def fail(name: str) -> bool:
        nonlocal seen
        seen += name == call
        return name == call and seen > after

    driver.fail_at = fail
    with pytest.raises(GpuError):
        load(bundle, driver)
    assert not any(driver.live.values()), driver.live


# Benchmark bundles


def test_random_weights_fill_every_matrix(tmp_path: Path, driver: RecordingDriver, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))
    settings = RandomSettings("llama-3.2-1b", tmp_path / "x.ull", layers=1, context=64)
    bundle = open_bundle(build_random(settings).path)
    program = load(bundle, driver)
    assert [launch.kernel for launch in driver.launches[-2:]] == [PROBE] * 2
    filling = driver.launches[:-2]
    fills = {launch.params.output: launch.params for launch in filling}
    assert {launch.kernel for launch in filling} == {"ull_fill"}
    matrices = {name: entry for name, entry in bundle.tensors.items() if name.endswith(".weight")}
    assert len(fills) == len(matrices) and len({fill.seed for fill in fills.values()}) == len(fills)
    for name, entry in matrices.items():
        fill = fills[program._models[""].placed.places.tensor(name)]
        formats = {"F8_E4M3": 0, "F16": 1, "BF16": 2}
        assert (fill.bytes, fill.format, fill.amplitude) == (entry.nbytes, formats[entry.dtype], 1.0)
    for name, value in (("layers.0.attn_norm", 1.0), ("layers.0.down.scale", math.sqrt(3 / 8192))):
        entry, address = bundle.tensors[name], program._models[""].placed.places.tensor(name)
        assert address is not None
        assert (driver.device_bytes(address, entry.nbytes).view(np.float32) == np.float32(value)).all()
    program.close()


# Refusals


def refused(bundle: Bundle, driver: Driver, code: str, words: str) -> None:
    with pytest.raises(GpuError, match=words) as caught:
        load(bundle, driver)
    assert caught.value.code == code
    assert not any(getattr(driver, "live", {}).values())


def test_a_gpu_of_another_architecture(bundle: Bundle) -> None:
    driver = RecordingDriver(dataclasses.replace(H200, name="NVIDIA B200", capability=(10, 0)))
    words = r"built for sm_90a .*B200 has 10\.0; an H100, H200 or GH200 is needed, or a bundle for target sm_100a"
    refused(bundle, driver, "wrong_gpu", words)


def test_a_driver_older_than_the_kernels(bundle: Bundle) -> None:
    driver = RecordingDriver(dataclasses.replace(H200, driver=(12, 8)))
    refused(bundle, driver, "old_driver", r"compiled by CUDA 13\.\d+, the driver speaks CUDA 12\.8; update")


def test_an_older_driver_of_the_same_major_version_will_do(bundle: Bundle) -> None:
    load(bundle, RecordingDriver(dataclasses.replace(H200, driver=(13, 0)))).close()


def test_not_enough_memory_says_how_much_is_needed_and_free(bundle: Bundle) -> None:
    driver = RecordingDriver(free_bytes=1_000_000)
    refused(bundle, driver, "gpu_memory", r"needs \d+\.\d MB of device memory .*only 1\.0 MB are free\. Lower")


def test_a_gpu_that_could_never_hold_it(bundle: Bundle) -> None:
    small = RecordingDriver(dataclasses.replace(H200, memory_bytes=1_000_000))
    refused(bundle, small, "gpu_memory", "this GPU .* in all; use a larger GPU")
    sliced = RecordingDriver(dataclasses.replace(H200, name="NVIDIA H200 MIG 1g.18gb", memory_bytes=1_000_000))
    refused(bundle, sliced, "gpu_memory", "this MIG slice .*use a larger slice or the whole GPU")


def test_no_gpu_at_all(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings.driver as api

    def missing() -> None:
        raise RuntimeError("libcuda.so.1 cannot be found")

    monkeypatch.setattr(api, "cuDriverGetVersion", missing)
    with pytest.raises(GpuError, match="needs an NVIDIA GPU, but no NVIDIA driver is installed") as caught:
        Driver()
    assert caught.value.code == "no_gpu"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("CUDA_ERROR_NO_DEVICE", "no_gpu", "cuInit failed: CUDA_ERROR_NO_DEVICE; the driver sees no GPU"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "old_driver", "reboot after its update"),
        ("CUDA_ERROR_UNKNOWN", "gpu_failed", "cuInit failed: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_what_the_driver_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, name: str, code: str, words: str) -> None:
    import cuda.bindings.driver as api

    monkeypatch.setattr(api, "cuDriverGetVersion", lambda: (api.CUresult.CUDA_SUCCESS, 13000))
    monkeypatch.setattr(api, "cuInit", lambda flags: (getattr(api.CUresult, name),))
    with pytest.raises(GpuError, match=words) as caught:
        Driver()
    assert (caught.value.code, caught.value.field) == (code, name)


def test_a_changed_cubin(bundle_path: Path, tmp_path: Path, driver: RecordingDriver) -> None:
    copy = Path(shutil.copytree(bundle_path, tmp_path / "x.ull"))
    cubin = copy / "code/second.cubin"
    raw = bytearray(cubin.read_bytes())
    raw[-1] ^= 1
    cubin.write_bytes(raw)
    with pytest.raises(BundleError, match=r"second\.cubin differs from its SHA-256"):
        load(open_bundle(copy), driver)
    assert not any(driver.live.values())


def test_a_cubin_that_the_driver_refuses(bundle: Bundle, driver: RecordingDriver) -> None:
    def refuse(cubin: bytes) -> int:
        raise GpuError("bad_code", "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_INVALID_IMAGE")

    driver.load_module = refuse  # type: ignore[method-assign]
    refused(bundle, driver, "bad_code", r"code/\w+\.cubin cannot be loaded: .*INVALID_IMAGE; rebuild the bundle")


def test_another_process_is_a_warning(bundle: Bundle, driver: RecordingDriver, monkeypatch: Any) -> None:
    monkeypatch.setattr("ull.gpu.program.other_processes", lambda info: [123, 456])
    log = io.StringIO()
    Program(bundle, Log(stream=log), driver=driver).close()
    assert "warning gpu" in log.getvalue() and "123, 456" in log.getvalue()


@pytest.mark.parametrize("differences", [(1, 100), (0, 0)])
def test_where_products_of_warpgroups_are_others_prompts_are_not_read_in_chunks(
    tmp_path: Path, driver: RecordingDriver, differences: tuple[int, int]
) -> None:
    """Or where the probe cannot tell."""
    driver.differences = differences
    log = io.StringIO()
    bundle = open_bundle(build_bundle(tmp_path, ForwardRecipe(tree_products="warp")))
    program = Program(bundle, Log(stream=log), driver=driver)
    assert program.handover["chunk"] == 0 and not any("chunk" in name for name in kernels_of(driver))
    assert "warning gpu" in log.getvalue() and "read 64 tokens at a time" in log.getvalue()
    program.close()


@pytest.mark.parametrize("differences", [(1, 100), (0, 0)])
def test_where_products_of_warpgroups_are_others_they_make_no_trees(
    bundle: Bundle, driver: RecordingDriver, differences: tuple[int, int]
) -> None:
    assert bundle.manifest.forward.tree_products == "warpgroup"
    driver.differences = differences
    refused(bundle, driver, "wrong_gpu", r"^on NVIDIA H200 .* otherwise than plain .* with --tree-products warp$")


def kernels_of(driver: RecordingDriver) -> list[str]:
    """Of all graphs."""
    return [launch.kernel for graph in driver.graphs.values() for launch in graph]


def test_a_chunk_reads_a_prompt_layer_by_layer(program: Program, driver: RecordingDriver) -> None:
    graph = driver.graphs[program.handover["chunk"]]
    names = [launch.kernel for launch in graph]
    layers = program.sizes.model.layers
    assert names[:2] == ["ull_begin_chunk", "ull_chunk_embed"] and names[-1] == "ull_accept"
    for name, each in (("norm", 2), ("qkv", 1), ("store", 1), ("o", 1), ("gate_up", 1), ("down", 1)):
        assert names.count(f"ull_chunk_{name}") == each * layers
    assert [launch.overlaps for launch in graph] == [False, False, *[True] * (len(graph) - 2)]
    region = {name: program._arena.address(name) for name in program._plan.regions}
    own = {"chunk": "chunk", "residual": "chunk residual", "qkv": "chunk qkv", "round": "round", "pages": "page table"}
    inputs = {"qkv": "chunk normed", "o": "chunk attention", "gate_up": "chunk normed", "down": "chunk mlp"}
    outputs = {"qkv": "chunk qkv", "o": "chunk residual", "gate_up": "chunk mlp", "down": "chunk residual"}
    weights, image, layer = region["weights"], program._image, 0
    for launch in graph:
        kernel, launched = launch.kernel.removeprefix("ull_chunk_"), launch.params
        for field, value in pointers_of(launched):
            if field in own and (field != "qkv" or kernel == "store") and (field != "round" or kernel == "ull_accept"):
                assert value == region[own[field]], (kernel, field)
        if kernel in inputs:
            stem = f"layers.{layer}.{kernel}"
            assert (launched.activations, launched.output) == (region[inputs[kernel]], region[outputs[kernel]])
            assert launched.weights == weights + image.offset(f"{stem}.weight")
            assert launched.scale == weights + image.offset(f"{stem}.scale") and launched.bias is None
        if kernel == "store":
            assert launched.k_norm == weights + image.offset(f"layers.{layer}.k_norm")
            assert launched.kv_scale == weights + image.offset(f"layers.{layer}.kv_scale")
            assert launched.layer_offset == layer * program.sizes.layer_page_bytes
        if kernel == "attention":
            counters = region["counters"] + 4 * program.sizes.chunk_counter
            assert (launched.partial, launched.counters) == (region["attention parts"], counters)
        layer += kernel == "down"
    weight_of = [launch.params.norm_weight for launch in graph if launch.kernel == "ull_chunk_norm"]
    names = [f"layers.{layer}.{norm}_norm" for layer in range(layers) for norm in ("attn", "mlp")]
    assert weight_of == [weights + image.offset(name) for name in names]


def test_a_last_chunk_draws_as_a_round_of_one_token_does(program: Program, driver: RecordingDriver) -> None:
    def same(launches: list[Launched]) -> list[tuple[str, tuple[int, int], bytes]]:
        return [(launch.kernel, launch.grid, bytes(launch.params)) for launch in launches]

    graph, chunk = driver.graphs[program.handover["last_chunk"]], driver.graphs[program.handover["chunk"]]
    single = graph_of(program, driver, 1)
    layers = len(chunk) - 1  # all but accept
    assert same(graph[:layers]) == same(chunk[:layers])
    last, *drawing = graph[layers:]
    assert [launch.kernel for launch in drawing] == [
        *("ull_head_1", "ull_sample_scan", "ull_sample_draw", "ull_sample_filter", "ull_accept")
    ]
    assert same(drawing) == same(single[-len(drawing) :])
    assert [launch.overlaps for launch in graph] == [False, False, *[True] * (len(graph) - 2)]
    assert (last.kernel, last.grid, last.params.normed) == ("ull_chunk_norm", (1, 1), None)
    region = {name: program._arena.address(name) for name in program._plan.regions}
    assert last.params.last == region["residual"] == drawing[0].params.residual
    assert (last.params.residual, last.params.partial) == (region["chunk residual"], region["chunk partial sums"])
    assert last.params.unit == 16.0
    down = f"layers.{program.sizes.model.layers - 1}.down.scale"
    assert last.params.scale == region["weights"] + (program._image.offset(down) or 0)
    norms = [launch.params for launch in graph[:layers] if launch.kernel == "ull_chunk_norm"]
    assert not any(params.last for params in norms)


def test_where_nvml_is_missing_nobody_else_is_seen() -> None:
    assert checks.other_processes(H200) == []
