"""Kernels that need a GPU, replaced by references on a CPU, as low down as can be: everything above is the real package."""
