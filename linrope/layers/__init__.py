"""Layers: attention, short convolution, forget gate, and the states they carry."""
