"""How rows are dealt: pieces are packed, change places, and are cut."""
