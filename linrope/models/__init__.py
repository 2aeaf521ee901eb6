"""Models made of the layers, and their files."""
