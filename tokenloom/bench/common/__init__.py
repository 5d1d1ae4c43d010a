"""What all benchmarks share: shapes, inputs, clocks, percentiles, files and charts."""
