"""Triton kernels and the functions that launch them; importing any of these modules imports triton."""
