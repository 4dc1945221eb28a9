"""Grid, block and shared memory of each kernel, by the module that owns it."""
