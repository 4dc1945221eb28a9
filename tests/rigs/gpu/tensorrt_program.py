"""`python tests/rigs/gpu/tensorrt_program.py build|serve|measure|probe ...`: ull-build, ulld, or benchmarks of plans.

TensorRT and the driver are doubles; TensorRT's contexts run as kernels of the driver double. Environment:
ULL_TEST_KERNELS, a folder of kernel sources that the build compiles in place of the real ones; ULL_TEST_TENSORRT,
options of the double (tensorrt_double/tensorrt/behaviour.py), separated by commas.
"""

import json
import os
import sys
from pathlib import Path

import tensorrt_rig
from host_call import HostCalls

tensorrt_rig.load()
import tensorrt.behaviour  # noqa: E402
import tensorrt.runtime  # noqa: E402

calls = HostCalls()
tensorrt.runtime.enqueue = calls.enqueue

tensorrt.runtime.is_capturing = calls.is_capturing
tensorrt.behaviour.options.read(os.environ.get("ULL_TEST_TENSORRT", ""))


def measure(bundle: Path) -> int:
    """What bench/h200 measures of a bundle's plans, in two rounds."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench/h200"))
    import plans

    from ull.bundle import open_bundle

    plans.ROUNDS, plans.CONTEXTS, plans.TREES = 2, (8,), (1, 16)
    plans.build = lambda folder, *options: (open_bundle(bundle), 0.0)
    report = plans.measure_plans(bundle.parent)
    plans.print_plans(report)
    print(json.dumps(report))
    return 0


def probe(folder: Path) -> int:
    """The probes of bench/h200 on a model that the double is quick with: each finding on a line."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench/h200"))
    import plan_probe

    from tensorrt_subjects import SMALL

    plan_probe.FLUSHED_BYTES, plan_probe.REPEATS, plan_probe.REPLAYS = 1 << 16, 2, 2
    size = {"rows": 48, "columns": 64}
    for finding in (
        *plan_probe.probe_linear("llama-3.1-8b", "layers.0.o", size),
        *plan_probe.probe_linear("llama-3.1-8b", "lm_head", size, (3,)),
        *plan_probe.probe_profiles("", str(folder), SMALL),
        *plan_probe.probe_capture("", str(folder), SMALL, 20),
    ):
        print(json.dumps(finding))
    return 0


def main(arguments: list[str]) -> int:
    if arguments[0] == "serve":
        from ull.daemon.main import run

        return run(arguments[1:])
    if arguments[0] == "probe":
        return probe(Path(arguments[1]))
    if arguments[0] == "measure":
        return measure(Path(arguments[1]))
    from ull_build import cli
    from ull_build.code import kernels

    if sources := os.environ.get("ULL_TEST_KERNELS"):
        kernels.SOURCES = Path(sources)
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
