"""Builds a model as TensorRT engines: the forward cut into segments at attention, one plan per segment.

`weights` reads what a segment multiplies with, `graph` and `network` describe its maths, `plans` builds and writes the
plans. Weights are FP8 codes, with their rows' scales multiplied onto the product; activations FP8 with a calibrated
scale per tensor; the residual float32.
"""
