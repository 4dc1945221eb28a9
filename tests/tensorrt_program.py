"""`python tests/tensorrt_program.py build|serve|measure ...`: ull-build, ulld, or the benchmark of plans on doubles.

TensorRT and the driver are doubles; TensorRT's contexts run as kernels of the driver double. Environment:
ULL_TEST_KERNELS, a folder of kernel sources that the build compiles in place of the real ones; ULL_TEST_UNSTABLE, a
segment whose plan computes something else.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tensorrt_rig
from host_call import HostCalls

tensorrt_rig.load()
import tensorrt.runtime  # noqa: E402

calls = HostCalls()
tensorrt.runtime.enqueue = calls.enqueue

if unstable := os.environ.get("ULL_TEST_UNSTABLE"):
    evaluate = tensorrt.runtime.run

    def run(graph: Any, inputs: Any) -> Any:
        found = evaluate(graph, inputs)
        if graph.name == unstable:
            for index in graph.outputs:
                found[index] = np.roll(found[index], 1, axis=-1)
        return found

    tensorrt.runtime.run = run


def measure(bundle: Path) -> int:
    """What bench/h200 measures of a bundle's plans, in two rounds."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "bench/h200"))
    import plans

    from ull.bundle import open_bundle

    plans.ROUNDS, plans.CONTEXTS, plans.TREES = 2, (8,), (1, 16)
    plans.build = lambda folder, *options: (open_bundle(bundle), 0.0)
    report = plans.measure_plans(bundle.parent)
    plans.print_plans(report)
    print(json.dumps(report))
    return 0


def main(arguments: list[str]) -> int:
    if arguments[0] == "serve":
        from ull import launch

        return launch.run(arguments[1:])
    if arguments[0] == "measure":
        return measure(Path(arguments[1]))
    from ull_build import cli, kernels

    if sources := os.environ.get("ULL_TEST_KERNELS"):
        kernels.SOURCES = Path(sources)
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
