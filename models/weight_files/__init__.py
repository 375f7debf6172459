"""Weight files: the choice of a folder's weight files, a reader for each format, and a writer of safetensors."""
