"""Files that weights come in: which of a folder's are the model, and one reader for each format."""
