"""Layers: attention, short convolution, forget gate, MLP, and the states they carry."""
