"""Grids of training runs, and what is measured of trained models."""
