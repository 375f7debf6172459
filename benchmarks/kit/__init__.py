"""Tools that benchmarks and the repository's own files are made with."""
