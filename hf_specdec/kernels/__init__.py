"""Triton kernels: twins of plain torch functions, with the same signatures and one test suite.

A function of this package computes what its torch twin computes, in fewer passes over memory. The
twin is the definition: it runs wherever Triton doesn't, and a kernel that disagrees with it on this
machine is never used (`runtime.trusted`).
"""
