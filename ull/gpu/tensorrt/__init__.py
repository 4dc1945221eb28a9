"""TensorRT plans as a forward of the graph program."""
