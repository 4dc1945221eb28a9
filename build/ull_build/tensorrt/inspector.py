"""What TensorRT's inspector says that linears became: whether an FP8 linear multiplies FP8 operands.

Strongly typed networks say what is computed, not by which kernel: FP8 operands that TensorRT does not fuse are
dequantised and multiplied in 16 bits, with right results and none of the speed. Only the inspector tells. Its JSON is
read leniently: its layout differs between versions, and fused layers name what they are made of in various places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ull_build.tensorrt.weights import BF16, F8, Linear

UNSEEN = "not named by the inspector"
_TYPES = (
    ("FP8", re.compile(r"fp8|e4m3|float8", re.IGNORECASE)),
    ("BF16", re.compile(r"bf16|bfloat16", re.IGNORECASE)),
    ("HALF", re.compile(r"half|fp16|float16", re.IGNORECASE)),
    ("FLOAT", re.compile(r"float|fp32", re.IGNORECASE)),
)
_TYPE_KEYS = re.compile(r"datatype|data_type|format|^type$", re.IGNORECASE)


def unexpected_operands(information: Any, linears: Mapping[str, Linear]) -> dict[str, str]:
    """The linears whose product has not the operands that it was given: what it has instead, as "BF16 x BF16".

    `information`: the inspector's account of a plan, as JSON gives it, of every profile. A linear that no layer names
    is UNSEEN.
    """
    found = {}
    for name, linear in linears.items():
        operands = operand_types(information, f"{name}.matmul")
        wrong = [types for types in operands if expected_type(linear) not in types]
        if wrong:
            found[name] = " x ".join(wrong[0]) or "unknown"
        elif not operands:
            found[name] = UNSEEN
    return found


def expected_type(linear: Linear) -> str:
    """Of a linear's operands, in the words of `_TYPES`."""
    if linear.rows.dtype == F8:
        return "FP8"
    return "BF16" if linear.rows.dtype == BF16 else "HALF"


def operand_types(information: Any, product: str) -> list[list[str]]:
    """The types of the inputs of each layer that names `product`, alone or fused with others."""
    found = []
    for layer in _layers(information):
        if product in _words(layer):
            inputs: list[Any] = next((value for key, value in layer.items() if key.lower() == "inputs"), [])
            weights: Any = next((value for key, value in layer.items() if key.lower() == "weights"), {})
            types = [_type_of(item) for item in [*inputs, weights] if isinstance(item, dict)]
            found.append([kind for kind in types if kind])
    return found


def _layers(information: Any) -> Iterator[dict[str, Any]]:
    """Every object that has inputs, however deep: those of several profiles may lie apart."""
    if isinstance(information, dict):
        if any(key.lower() == "inputs" and isinstance(value, list) for key, value in information.items()):
            yield information
        for value in information.values():
            yield from _layers(value)
    elif isinstance(information, list):
        for value in information:
            yield from _layers(value)


def _words(layer: Mapping[str, Any]) -> set[str]:
    """The names in a layer's own texts: "a.matmul+a.output" and "[ONNX Layer: a.matmul]" name a.matmul."""
    texts = [value for value in layer.values() if isinstance(value, str)]
    return {word for text in texts for word in re.findall(r"[\w.]+", text)}


def _type_of(tensor: Mapping[str, Any]) -> str:
    """The type of an input, or "" where it is none that numbers are multiplied in."""
    for key, value in tensor.items():
        if isinstance(value, str) and _TYPE_KEYS.search(key):
            for kind, pattern in _TYPES:
                if pattern.search(value):
                    return kind
    return ""
