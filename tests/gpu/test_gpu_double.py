"""Loading onto the driver double: cuda-python for real, captured graphs that run the real kernels on the emulator.

Each `scenario_*` runs in a process of its own, where libcuda.so.1 is the double.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
from device_bundles import PROMPT, build_with_stubs, emulated_kernels
from ull import _native
from ull.bundle import open_bundle
from ull.gpu import params
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings

ROOT = Path(__file__).parents[2]
CONTEXT = 512
BANDWIDTH = ROOT / "bench/h200/read.cu"
ANSWER = 12

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator


def build_tiny(folder: Path, context: int = CONTEXT) -> Path:
    speculation = SpeculationSettings(medusa=ROOT / "engines/tiny/medusa")
    options = {"target": "sm_90a", "evaluate": False, "context": context, "speculation": speculation}
    with pytest.MonkeyPatch.context() as patch:
        return build_with_stubs(
            patch, folder / "kernels", Settings(ROOT / "engines/tiny", folder / "tiny.ull", "tiny", **options)
        )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """engines/tiny for a GPU; its cubins name the kernels, whose code is the emulator's."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def emulated(bundle: Path) -> str:
    """Every kernel of the bundle, and those of the bandwidth measurement."""
    return emulated_kernels(bundle, BANDWIDTH)


def run(scenario: str, *arguments: object, kernels: str | None = None, **options: Any) -> Any:
    """Runs `scenario` under the double; what it printed as JSON. Fails with its traceback."""
    program = f"import test_gpu_double as t; t.{scenario}(*{arguments!r})"
    environment = driver_double.environment(kernels, imports=[ROOT / "bench", ROOT / "bench/h200"], **options)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def scenario_rounds(path: str, persistent: bool) -> None:
    """Decodes PROMPT plainly, then verifies what came out as chains of several lengths."""
    from ull.gpu.program import load

    program = load(open_bundle(path), persistent=persistent)
    rounds = program.replay()
    rounds.prefill(PROMPT[:-1])
    place = len(PROMPT) - 1
    plain = [result.tokens[0].token for result in rounds.decode(PROMPT[-1], place, ANSWER)]
    verified = []
    for size in (2, 4, 8, 12):
        result = program.replay().wait(rounds.launch([PROMPT[-1], *plain[: size - 1]], place))
        verified.append([result.tokens[index].token for index in range(result.count)])
    wrong = rounds.wait(rounds.launch([PROMPT[-1], plain[0], plain[1] + 1, 7], place))
    rounds.drain()
    program.close()
    corrected = [item.token for item in wrong.tokens[: wrong.count]]
    print(json.dumps({"plain": plain, "verified": verified, "corrected": corrected}))


@pytest.fixture(scope="module")
def cpu_model(tmp_path_factory: pytest.TempPathFactory) -> _native.CpuModel:
    path = tmp_path_factory.mktemp("cpu") / "cpu.ull"
    on_cpu = build(Settings(ROOT / "engines/tiny", path, "cpu", evaluate=False, context=CONTEXT))
    return _native.CpuModel(open_bundle(on_cpu.path).native_spec())


@pytest.mark.parametrize("persistent", [False, True])
def test_rounds_say_what_the_cpu_says(
    bundle: Path, emulated: Path, cpu_model: _native.CpuModel, persistent: bool
) -> None:
    """Every kernel, in captured graphs, from the embedding to the mapped result."""
    said = run("scenario_rounds", str(bundle), persistent, kernels=emulated, multiprocessors=4)
    expected = cpu_model.generate_greedy(np.array(PROMPT, np.int32), ANSWER).tolist()
    assert said["plain"] == expected
    assert said["verified"] == [expected[:size] for size in (2, 4, 8, 12)]
    assert (
        said["corrected"] == expected[:2]
    )  # the draft's second token is another: what stands there instead, and no more


LONG = 3 * [*PROMPT, 2, 71, 828, 1500, 9, 33] * 6 + PROMPT  # 298 tokens


def scenario_chunks(path: str) -> None:
    """Tokens and logprobs behind LONG, read 64 tokens at a time, in a chunk, and by last chunks of several lengths."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    assert program.handover["chunk"] != 0
    rounds, place, said = program.replay(), len(LONG) - 1, []
    for first in range(0, place, params.TREE_TOKENS):
        part = LONG[first : min(first + params.TREE_TOKENS, place)]
        rounds.wait(rounds.launch(part, first, params.PREFILL))
    for whole in (False, True):
        if whole:
            rounds.prefill(LONG[:-1])
        results = rounds.decode(LONG[-1], place, ANSWER, top_logprobs=3)
        said.append([(item.tokens[0].token, item.tokens[0].logprob) for item in results])
    for count in (len(LONG), 129, 100, 1):
        first = len(LONG) - count
        if first:
            rounds.prefill(LONG[:first])
        results = rounds.answer(LONG[first:], first, ANSWER, top_logprobs=3)
        said.append([(item.tokens[0].token, item.tokens[0].logprob) for item in results])
    rounds.drain()
    program.close()
    print(json.dumps(said))


def test_a_prompt_in_chunks_says_what_the_cpu_says(bundle: Path, emulated: Path, cpu_model: _native.CpuModel) -> None:
    in_rounds, *others = run("scenario_chunks", str(bundle), kernels=emulated, multiprocessors=4)
    in_a_chunk = others[0]
    assert others == 5 * [in_rounds]
    expected = cpu_model.generate_greedy(np.array(LONG, np.int32), ANSWER).tolist()
    assert [token for token, _ in in_a_chunk] == expected


WIDE = 590  # tokens: more than four multiprocessors' two blocks of each of two heads take in one split each


def scenario_wide(path: str) -> None:
    """Plain rounds and chains behind WIDE tokens, with attention in one wave of blocks and in two."""
    from ull.gpu.program import load
    from ull.gpu.rounds import FULL, PLAIN

    program = load(open_bundle(path))
    wide = program.handover["wide"]
    rounds, text = program.replay(), (2 * LONG)[:WIDE]
    rounds.prefill(text[:-1])
    said = {}
    for is_wide in (False, True):
        plain, position, token = list[Any](), WIDE - 1, text[-1]
        for index in range(4):
            result = rounds.wait(
                rounds.launch([token], position, sampler=PLAIN if index % 2 else FULL, top_logprobs=-1, wide=is_wide)
            )
            token, position = result.tokens[0].token, position + 1
            plain.append((token, result.tokens[0].logprob))
        chains = []
        for size in (1, 2, 4, 8):
            chain = [text[-1], *(token for token, _ in plain), 5, 6, 7][:size]
            result = rounds.wait(rounds.launch(chain, WIDE - 1, top_logprobs=3, wide=is_wide))
            told = [(one.token, one.logprob, one.top[2].logprob) for one in result.tokens[: result.count]]
            chains.append(told)
        said[is_wide] = [plain, chains]
    rounds.drain()
    program.close()
    about = {"from": wide["from"], "graphs": sorted(wide["graphs"]), "names": [sorted(wide["singles"])]}
    about["names"].append(sorted(wide["bursts"]))
    print(json.dumps([about, said[False], said[True]]))


def test_more_blocks_of_attention_change_no_bit(bundle: Path, emulated: str, tmp_path: Path) -> None:
    about, narrow, wide = run(
        "scenario_wide", str(build_tiny(tmp_path, context=1024)), kernels=emulated, multiprocessors=4
    )
    assert about == {"from": 512, "graphs": [1, 2, 4, 8], "names": [["plain"], ["plain"]]}
    assert wide == narrow
    assert [len(chain) for chain in narrow[1]] == [1, 2, 4, 5]


def scenario_redraws(path: str) -> None:
    """A chain's nodes drawn from again: without their best token, and how likely the best three are behind each."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    rounds, place = program.replay(), len(PROMPT) - 1
    rounds.prefill(PROMPT[:-1])
    plain = [result.tokens[0].token for result in rounds.decode(PROMPT[-1], place, 3)]
    round_ = rounds.wait(rounds.launch([PROMPT[-1], *plain[:2]], place, top_logprobs=3))
    assert round_.count == 3
    best = [[[one.token, one.logprob] for one in token.top[:3]] for token in round_.tokens[:3]]
    again = []
    for node in (2, 0, 1):
        allowed = [token for token in range(4096) if token != best[node][0][0]]
        for sampling in ({"top_logprobs": 3}, {"top_logprobs": 3, "temperature": 1e-6, "seed": 3}):
            (token,) = rounds.wait(rounds.redraw(node, place + node, allowed, **sampling)).tokens[:1]
            again.append([node, [token.token, token.logprob], [[one.token, one.logprob] for one in token.top[:3]]])
    wanted = [(node, token) for node in (1, 2, 0) for token, _ in best[node]]
    answer = rounds.wait(rounds.score([token for _, token in wanted], [node for node, _ in wanted]))
    scores = [[token.token, token.logprob] for token in answer.tokens[: answer.count]]
    rounds.drain()
    program.close()
    print(json.dumps({"best": best, "again": again, "scores": scores}))


def test_what_a_round_leaves_can_be_drawn_from_again(bundle: Path, emulated: Path) -> None:
    """The second best token where the best is not allowed; log-probabilities with the bits that rounds report."""
    said = run("scenario_redraws", str(bundle), kernels=emulated, multiprocessors=4)
    best = said["best"]
    assert said["again"] == [[node, best[node][1], best[node]] for node in (2, 0, 1) for _ in range(2)]
    assert said["scores"] == [*best[1], *best[2], *best[0]]


def scenario_forced(path: str) -> None:
    """PROMPT's first tokens by a prefill and plain rounds, and with its end forced; [token, logprob, top] of each."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    rounds, place = program.replay(), len(PROMPT) - 1
    said = []
    for temperature in (0.0, 0.8):
        sampling = {"temperature": temperature, "seed": 5, "top_logprobs": 3}
        for forced in (0, 1, 3, place):
            if place > forced:
                rounds.prefill(PROMPT[: place - forced])
            launched = [rounds.launch(PROMPT[place - forced :], place - forced, forced=forced, **sampling)]
            launched += [rounds.launch([0], 0, params.CONTINUE, **sampling) for _ in range(3)]
            results = [rounds.wait(sequence) for sequence in launched]
            assert [result.count for result in results] == [1] * 4
            tokens = [result.tokens[0] for result in results]
            said.append([(token.token, token.logprob, [one.logprob for one in token.top[:3]]) for token in tokens])
    rounds.drain()
    program.close()
    print(json.dumps(said))


def test_a_prompts_end_can_be_forced_without_a_bit_of_difference(bundle: Path, emulated: Path) -> None:
    said = run("scenario_forced", str(bundle), kernels=emulated, multiprocessors=4)
    assert said[:4] == [said[0]] * 4 and said[4:] == [said[4]] * 4
    assert said[0] != said[4]


def scenario_logits(path: str, output: str) -> None:
    """The logits of a text by rounds of several sizes."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    rounds = program.replay()
    text = (PROMPT * 7)[:68]
    np.savez(
        output, **{str(size): rounds.logits(text, size=size) for size in (64, 8)}, moved=rounds.logits(text[3:], 3)
    )
    program.close()
    print("null")


def test_logits_are_the_cpus_and_do_not_depend_on_the_rounds(
    bundle: Path, emulated: Path, cpu_model: _native.CpuModel, tmp_path: Path
) -> None:
    run("scenario_logits", str(bundle), str(tmp_path / "logits.npz"), kernels=emulated, multiprocessors=4)
    found = np.load(tmp_path / "logits.npz")
    np.testing.assert_array_equal(found["8"], found["64"])
    np.testing.assert_array_equal(found["moved"], found["64"][3:])
    expected = cpu_model.logits(np.array((PROMPT * 7)[:68], np.int32))
    assert np.linalg.norm(found["64"] - expected) < 0.01 * np.linalg.norm(expected)


def scenario_lost(path: str) -> None:
    """A round that takes the context with it, then everything is given back."""
    from ull.errors import GpuError
    from ull.gpu.program import load

    program = load(open_bundle(path))
    try:
        program.replay().launch(PROMPT, 0)
        program.replay().drain()
    except GpuError as error:
        program.close()
        print(json.dumps(error.message))


def test_a_lost_device_is_given_back_without_another_error(bundle: Path, emulated: Path) -> None:
    said = run("scenario_lost", str(bundle), kernels=emulated, multiprocessors=4, fault="sticky=1")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said


def scenario_load(path: str) -> None:
    """Loads and closes; prints the error's code and message, or None."""
    from ull.errors import UllError
    from ull.gpu.program import load

    try:
        load(open_bundle(path)).close()
    except UllError as error:
        print(json.dumps([error.code, error.message]))
    else:
        print("null")


def test_it_loads_and_closes(bundle: Path, emulated: Path) -> None:
    assert run("scenario_load", str(bundle), kernels=emulated) is None


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"devices": 0}, "no_gpu", "the driver sees no GPU"),
        ({"capability": "8.0"}, "wrong_gpu", "has 8.0; an H100, H200 or GH200 is needed"),
        ({"driver": 12080}, "old_driver", "the driver speaks CUDA 12.8"),
        ({"free": 3_000_000}, "gpu_memory", "only 3.0 MB are free"),
        ({"name": "NVIDIA H200 MIG 1g.18gb", "memory": 3_000_000}, "gpu_memory", "use a larger slice"),
        ({"fault": "alloc=1"}, "gpu_memory", "end what else runs on the GPU"),
        ({"fault": "module=1"}, "bad_code", "CUDA_ERROR_NO_BINARY_FOR_GPU; rebuild the bundle"),
        ({"fault": "module=1:200"}, "bad_code", "cannot be loaded: cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE"),
    ],
)
def test_refusals_come_through_cuda_python(
    bundle: Path, emulated: Path, options: dict[str, Any], code: str, words: str
) -> None:
    found, message = run("scenario_load", str(bundle), kernels=emulated, **options)
    assert found == code and words in message


def scenario_describe() -> None:
    from ull.gpu.driver import describe_device

    print(json.dumps(describe_device(0)))


def test_reports_name_the_gpu() -> None:
    assert run("scenario_describe", multiprocessors=16, memory=18 << 30, name="NVIDIA H200 MIG 1g.18gb") == {
        "name": "NVIDIA H200 MIG 1g.18gb",
        "capability": "9.0",
        "multiprocessors": 16,
        "memory_bytes": 18 << 30,
        "driver": "13.0",
    }


def scenario_bench(path: str) -> None:
    """What bench/h200 measures, on little data."""
    from bandwidth import read_bandwidth
    from plans import measure_plans
    from rounds import RoundTimer

    from ull.gpu.program import load

    bandwidths = read_bandwidth(1 << 20, repeats=2)
    program = load(open_bundle(path))
    timer = RoundTimer(program)
    timer.time_rounds(1, 5, rounds=2, warm_up=1)
    times, heads = timer.time_rounds(2, 5, rounds=4, warm_up=1), timer.time_medusa(5, runs=3, warm_up=1)
    counts = [len(times.period), len(times.gap), len(times.busy), int((heads > 0).sum())]
    prompts = timer.time_prompt(330, prompts=1, warm_up=0)  # more passes than there are slots for
    slowest = [len(prompts.device), float(prompts.device.max()), float(prompts.host.max())]
    program.close()
    print(json.dumps([bandwidths, counts, times.mean_ns, slowest, measure_plans(Path("/nowhere"))]))


def test_the_benchmark_measures(bundle: Path, emulated: Path) -> None:
    bandwidths, counts, mean_ns, prompts, plans = run(
        "scenario_bench", str(bundle), kernels=emulated, multiprocessors=4
    )
    assert set(bandwidths) == {"bulk copies", "16-byte loads"} and min(bandwidths.values()) > 0
    assert counts == [3, 3, 4, 3] and mean_ns > 0
    assert prompts[0] == 1 and min(prompts[1:]) > 0
    assert not plans["installed"] and "pip install ull[tensorrt]" in plans["reason"]


def scenario_bench_persistent(path: str) -> None:
    """The table of plain rounds made of one kernel for all layers, and of none."""
    import work
    from rich.console import Console
    from tables import print_persistent

    work.build = lambda arch: Path(path)
    work.PERSISTENT_CONTEXTS = (8, 128)
    points = [finding["persistent"] for finding in work.time_persistent("tiny", 3, 4e12)]
    chained = {**points[0], "tree": 1, "context": 128}
    print_persistent(Console(width=132), [{"arch": "tiny", "points": [chained], "persistent": points}])
    places = [[point["tree"], point["context"], point["median_ms"]] for point in points]
    print(json.dumps([places, [point["kv_bytes"] for point in points]]))


def test_the_benchmark_measures_one_kernel_for_all_layers(bundle: Path, emulated: Path) -> None:
    points, kv = run("scenario_bench_persistent", str(bundle), kernels=emulated, multiprocessors=4)
    assert [point[:2] for point in points] == [[1, 8], [1, 128]] and all(point[2] > 0 for point in points)
    assert kv == [2 * 6 * 2 * 32 * 2 * context for context in (8, 128)]  # of 6 layers, 2 heads of 32, 2 bytes each


def scenario_bench_prefill(path: str) -> None:
    """Prompts of two lengths, and a turn, those that are read fast too, whose engine is the other one here."""
    import work

    work.build = lambda arch, variant: Path(path)
    work.repeats = lambda tokens: 1
    print(json.dumps([finding["prefill"] for finding in work.time_prompts("tiny", (64, 130), 4e12, [(66, 128)])]))


def test_the_benchmark_measures_prompts(bundle: Path, emulated: Path) -> None:
    found = run("scenario_bench_prefill", str(bundle), kernels=emulated, multiprocessors=4)
    assert {one["prompts"] for one in found} == {1}
    assert [(one["tokens"], one["behind"], one["widest"], one["fast"], one["draws"]) for one in found] == [
        *((64, 0, 512, False, False), (64, 0, 512, False, True), (64, 0, 64, False, False)),
        *((130, 0, 512, False, False), (130, 0, 512, False, True), (130, 0, 64, False, False)),
        *((66, 128, 512, False, False), (66, 128, 512, False, True), (66, 128, 64, False, False)),
        *((64, 0, 512, True, False), (64, 0, 512, True, True), (130, 0, 512, True, False)),
        *((130, 0, 512, True, True), (66, 128, 512, True, False), (66, 128, 512, True, True)),
    ]
    short, drawn, same, chunk, drawn_chunk, long, turn = found[:7]
    assert chunk["bytes"] == short["bytes"] == same["bytes"] < drawn["bytes"] == drawn_chunk["bytes"]
    assert long["bytes"] - 3 * short["bytes"] == 2 * 6 * 2 * 32 * 2 * (64 + 128)  # the cache before the later parts
    assert turn["bytes"] - chunk["bytes"] == 2 * 6 * 2 * 32 * 2 * 128
    for prompt in found:
        assert min(prompt[key] for key in ("median_ms", "median_ms_seen_by_host", "tokens_per_s", "tflop_per_s")) > 0


def scenario_compare(path: str) -> None:
    """One kernel for all layers against the chain, as it is, and with one logprob that differs in its last bit."""
    import work

    said: dict[bool, Any] = {}

    def decode(bundle: Any, persistent: bool, *arguments: Any) -> Any:
        if persistent not in said:
            said[persistent] = really(bundle, persistent, *arguments)
        return said[persistent]

    def compare() -> list[Any]:
        findings, complaint = [], ""
        try:
            for finding in work.compare_persistent("tiny", 70, 5):
                findings.append(finding["persistent_compared"])
        except RuntimeError as error:
            complaint = str(error)
        return [findings, complaint]

    work.build = lambda arch: Path(path)
    really, work.decode = work.decode, decode
    sound = compare()
    said[True][2][1] = float(np.nextafter(np.float32(said[True][2][1]), np.float32(-100)))
    print(json.dumps([sound, compare()]))


def test_one_kernel_for_all_layers_is_compared_bit_for_bit(bundle: Path, emulated: Path) -> None:
    (findings, complaint), flawed = run("scenario_compare", str(bundle), kernels=emulated, multiprocessors=4)
    assert [finding["same"] for finding in findings] == [None, True] and not complaint
    assert findings[1]["tokens"] == 5 and findings[1]["distinct"] > 1
    assert [finding["same"] for finding in flawed[0]] == [None, False]
    assert "in 1 of 5 rounds, first in round 2" in flawed[1]
