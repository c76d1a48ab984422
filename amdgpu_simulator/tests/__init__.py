"""Tests of the simulator that need no compiler: a few instructions each."""
