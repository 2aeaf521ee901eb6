"""Tests of linrope.positions."""
