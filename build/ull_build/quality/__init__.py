"""What quantising cost, and the calibration that keeps it low."""
