"""What TensorRT may do and need not: options of the double, for tests that want the less friendly case.

`options` is what plans and contexts of this process look at. `read(text)` sets them: "profile-bits,f16-sums".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields


@dataclass
class Options:
    profile_bits: bool = False  # each profile has kernels of its own, which sum in an order of their own
    place_bits: bool = False  # a kernel sums odd rows in another order than even ones
    f16_sums: bool = False  # the product of f16 tensors is summed in f16
    old_driver: bool = False  # a driver that the library cannot start on
    unstable: str = ""  # see `is_unstable`

    def read(self, text: str) -> None:
        """Sets the options that are named, with or without a value."""
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            name = name.replace("-", "_")
            assert name in {field.name for field in fields(self)}, f"the double has no option {name}"
            setattr(self, name, value or True)

    def is_unstable(self, segment: str, level: int, fp8: set[str]) -> bool:
        """Whether a plan computes something else. `unstable` names segments: "layer.1", "layer.1@31", "exit/LINEAR".

        Behind @ stand the optimisation levels at which it does, behind / the product that must have FP8 operands.
        """
        for text in filter(None, self.unstable.split("+")):
            found = re.fullmatch(r"(?P<name>[^@/]+)(@(?P<levels>\d+))?(/(?P<product>.+))?", text)
            assert found is not None, text
            is_meant = found["name"] == segment and str(level) in (found["levels"] or str(level))
            if is_meant and (found["product"] is None or found["product"] in fp8):
                return True
        return False


options = Options()
