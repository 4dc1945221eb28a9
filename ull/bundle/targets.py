"""What a bundle may be built for: the CPU, or one architecture of NVIDIA's GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Target = Literal["cpu", "sm_89", "sm_90a", "sm_100a"]


@dataclass(frozen=True)
class GpuArchitecture:
    """A GPU architecture, named as NVRTC names it; one with "a" is of exactly that compute capability."""

    capability: tuple[int, int]
    machines: str
    has_bulk_copies: bool  # which our kernels of the layers are made of; without them only TensorRT's own remain
    has_warpgroup_products: bool = False  # (wgmma) which our kernels of a prompt's chunks are made of


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability as it is written: "9.0"."""
    return f"{capability[0]}.{capability[1]}"


GPU_ARCHITECTURES: Final[dict[str, GpuArchitecture]] = {
    "sm_89": GpuArchitecture((8, 9), "an L4, L40S or RTX 40", has_bulk_copies=False),
    "sm_90a": GpuArchitecture((9, 0), "an H100, H200 or GH200", has_bulk_copies=True, has_warpgroup_products=True),
    "sm_100a": GpuArchitecture((10, 0), "a B200 or GB200", has_bulk_copies=True),
}
