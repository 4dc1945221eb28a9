"""What quantising costs."""
