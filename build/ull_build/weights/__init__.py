"""Weights quantised, packed and written, for the CPU and for a GPU."""
