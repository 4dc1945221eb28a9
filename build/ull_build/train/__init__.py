"""`ull-train`: Medusa heads and draft models for a target, distilled from the target's own outputs. Needs PyTorch."""
