"""The oracle: logits and tokens of Hugging Face transformers on small random checkpoints, kept as fixtures."""
