"""Device memory: laid out on paper first, then allocated in one piece, so that what is needed is known before it is."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal

from ull.bundle import round_up
from ull.errors import GpuError
from ull.gpu.driver import Driver

REGION_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Region:
    """Bytes of the arena under one name."""

    offset: int
    nbytes: int


class ArenaPlan:
    """Names and sizes of everything that is to lie in device memory."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.nbytes = 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Adds a region behind the others, aligned to REGION_ALIGNMENT. Raises ValueError for a name given twice."""
        if name in self.regions:
            raise ValueError(f"region {name!r} is reserved twice")
        self.regions[name] = Region(self.nbytes, nbytes)
        self.nbytes += round_up(nbytes, REGION_ALIGNMENT)


class Arena:
    """The allocation of a plan. Raises GpuError saying what is needed and free when it does not fit.

    `beside` bytes must stay free for what others allocate.
    """

    def __init__(self, driver: Driver, plan: ArenaPlan, beside: int = 0) -> None:
        self._driver = driver
        self.plan = plan
        free, total = driver.memory_info()
        if plan.nbytes + beside > free:
            raise GpuError("gpu_memory", _too_large(plan, beside, free, total))
        try:
            self.base = driver.allocate(plan.nbytes)
        except GpuError as error:
            if error.code != "gpu_memory":
                raise
            raise GpuError("gpu_memory", _too_large(plan, beside, free, total), error.field) from error

    def address(self, name: str) -> int:
        """Device address of a region."""
        return self.base + self.plan.regions[name].offset

    def close(self) -> None:
        self._driver.free(self.base)


def _too_large(plan: ArenaPlan, beside: int, free: int, total: int) -> str:
    needs = [(region.nbytes, name) for name, region in plan.regions.items()] + [(beside, "TensorRT's plans")]
    parts = " and ".join(f"{decimal(nbytes)} for {name}" for nbytes, name in sorted(needs, reverse=True)[:2])
    return (
        f"the engine needs {decimal(plan.nbytes + beside)} of device memory ({parts} among it); of the GPU's "
        f"{decimal(total)} only {decimal(free)} are free. Lower engine.context or engine.kv_pages, end what else runs "
        "on the GPU (see nvidia-smi), or build with a smaller precision"
    )
