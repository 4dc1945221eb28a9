"""The GPU side of an engine at load time: memory, kernels, captured graphs. Nothing here runs in the hot loop."""
