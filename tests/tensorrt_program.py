"""`python tests/tensorrt_program.py build|serve ...`: ull-build or ulld on the doubles of TensorRT and the driver.

TensorRT's contexts run as kernels of the driver double. Environment: ULL_TEST_KERNELS, a folder of kernel sources that
the build compiles in place of the real ones.
"""

import os
import sys
from pathlib import Path

import tensorrt_rig
from host_call import HostCalls

tensorrt_rig.load()
import tensorrt.runtime  # noqa: E402

calls = HostCalls()
tensorrt.runtime.enqueue = calls.enqueue


def main(arguments: list[str]) -> int:
    if arguments[0] == "serve":
        from ull import daemon

        return daemon.main(arguments[1:])
    from ull_build import cli, kernels

    if sources := os.environ.get("ULL_TEST_KERNELS"):
        kernels.SOURCES = Path(sources)
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
