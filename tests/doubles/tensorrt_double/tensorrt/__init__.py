"""A double of TensorRT: the real Python bindings, with everything that would need the library played in NumPy.

Put the folder above on the path and `import tensorrt` gives this. Enums, Dims, Weights, ILogger, IProgressMonitor are
those of the bindings; Builder and Runtime, and what they make, are stand-ins whose every use is checked against the
real classes (`signatures`). `evaluation.evaluate(network, inputs)` runs a recorded network; `runtime.enqueue` is the
hook through which an execution context runs.
"""

from . import builder, network, runtime
from .bindings import real

globals().update({name: value for name, value in vars(real).items() if not name.startswith("_")})

Builder = builder.Builder
Runtime = runtime.Runtime
Weights = network.Weights
__version__ = real.__version__
