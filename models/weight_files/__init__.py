"""Weight files: the choice of a folder's files, a reader for each format, and a writer of safetensors."""
