"""Kernels compiled for a model."""
