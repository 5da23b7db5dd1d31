"""How much of plain training's gain each way of coding the boundaries recovers: `python -m benchmarks.quality`."""
