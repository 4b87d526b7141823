"""Triton kernels and the functions that launch them. Importing any of these modules imports triton."""
